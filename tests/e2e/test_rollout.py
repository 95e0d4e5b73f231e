"""A rollout of two models with one replica each: the next builds start beside the old ones, and no request fails."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from support.e2e.headrace_process import Serve
from support.e2e.streams import steady_streams

MODEL = {"source": "smollm2", "max_model_len": 1024, "kv_cache_memory": "64MiB", "cpu_threads": 1}
TOKENS = 24


def _status(serve: Serve) -> list[tuple[str, int, str]]:
    return [(entry["id"], entry["generation"], entry["state"]) for entry in serve.status()["replicas"]]


def test_the_only_replicas_are_rolled_under_load(
    start: Callable[..., Serve], tmp_path: Path, eventually: Callable[..., None]
) -> None:
    spec = tmp_path / "two.yaml"
    spec.write_text(yaml.safe_dump({"models": [MODEL | {"name": name} for name in ("a", "b")]}))
    serve = start("-f", str(spec)).await_ready()
    bodies: list[dict[str, Any]] = [
        {"model": name, "prompt": [504, 3575, 282, index], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        for name in ("a", "b")
        for index in (1, 2)
    ]
    with steady_streams(serve.url, bodies) as outcomes:
        eventually(lambda: len(outcomes) >= len(bodies), 60, "that streams complete")
        done = serve.run("rollout", "--seconds", "0", seconds=400)
        print(done.stderr)
        before = len(outcomes)
        eventually(lambda: len(outcomes) >= before + len(bodies), 120, "that the new builds serve")
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert lines[-1] == "headrace: 2 of 2 rolled"
    assert _status(serve) == [("a-0", 2, "ready"), ("b-0", 2, "ready")]
    bad = [outcome for _, outcome in outcomes if not outcome.complete or len(outcome.token_ids) != TOKENS]
    assert not bad, bad[:3]
    print(f"{len(outcomes)} streams while two models were rolled, {len(bad)} failed")
