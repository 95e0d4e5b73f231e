"""Constraints that are made to be costly are answered within a second, and other streams go on meanwhile."""

import threading
import time

import httpx
import pytest

from support.e2e.headrace_process import Serve
from support.e2e.hostile_grammars import HOSTILE

ANSWER_SECONDS = 1.0
GAP_SECONDS = 0.25  # a token of the neighbour takes about 0.02


def _gaps(server: Serve, until: threading.Event, found: list[float]) -> None:
    """Seconds between the tokens of one free stream after another."""
    body = {"model": "smollm2", "prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
    while not until.is_set():
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60, trust_env=False) as answer:
            last = 0.0
            for line in answer.iter_lines():
                now = time.monotonic()
                if line.startswith("data: {") and last:
                    found.append(now - last)
                last = now


@pytest.mark.measure
def test_hostile_grammars(server: Serve, http: httpx.Client) -> None:
    for field in ("a", "b"):  # the checker's process and the replica's tokenizer start
        http.post("/v1/completions", json={"model": "smollm2", "prompt": "x", "guided_regex": field})
    gaps: list[float] = []
    until = threading.Event()
    neighbour = threading.Thread(target=_gaps, args=(server, until, gaps))
    neighbour.start()
    took = {}
    try:
        time.sleep(3)
        alone = max(gaps)
        gaps.clear()
        for name, fields in HOSTILE.items():
            started = time.monotonic()
            answer = http.post("/v1/completions", json={"model": "smollm2", "prompt": "x", "max_tokens": 4, **fields})
            took[name] = time.monotonic() - started
            assert answer.status_code in (200, 400), answer.text
            assert answer.status_code == 200 or "constrain" in answer.text or "guided_" in answer.text
    finally:
        until.set()
        neighbour.join()
    print({name: round(seconds, 3) for name, seconds in took.items()}, f"gaps: {max(gaps):.3f} s, alone {alone:.3f} s")
    assert len(took) >= 20 and max(took.values()) < ANSWER_SECONDS
    assert max(gaps) < GAP_SECONDS
