"""256 streams at once: all complete, memory is bounded, and disconnected clients free all resources."""

import time
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from support.e2e.headrace_process import Serve
from support.e2e.metrics_page import Metrics
from support.e2e.sampling_options import SAMPLING_OPTIONS
from support.e2e.streams import run_streams

MIB = 1 << 20
COUNT = 256
OUTPUT = 16
ROUTER_MIB = 64  # connections, parsers and JSON of 256 clients; glibc does not return memory
# The pool's pages, allocated at their first use, and activations: logits of 256 rows are 48 MiB, sampling copies some
# of them, and glibc's arenas fragment around such blocks (measured: 430 MiB after 13 rounds, then constant).
POOL_MIB = 512
RANK_MIB = POOL_MIB + 600


def _bodies(seed: int, tokens: int = OUTPUT) -> list[dict[str, Any]]:
    random = Random(seed)
    options: list[dict[str, Any]] = [{"temperature": 0.0}, *SAMPLING_OPTIONS]
    return [
        {
            "model": "smollm2",
            "prompt": [random.randrange(20, 40_000) for _ in range(random.randrange(8, 28))],
            "max_tokens": tokens,
            "ignore_eos": True,
            "seed": index,
            **options[index % len(options)],
        }
        for index in range(COUNT)
    ]


def _freed(metrics: Callable[[], Metrics], since: float) -> None:
    """Everything is free within two seconds or two steps of `since`, whichever is longer."""
    while busy := metrics().busy:
        allowed = max(2.0, 2 * metrics()["headrace_predicted_step_seconds"])
        assert time.monotonic() - since < allowed + 1.0, f"still busy (a second for the scrape included): {busy}"
        time.sleep(0.05)


@pytest.fixture
def pids(server: Serve) -> tuple[int, int]:
    """(router, rank)"""
    document = server.status()
    return document["routers"][0]["pid"], document["replicas"][0]["ranks"][0]["pid"]


def test_256_streams_complete_and_memory_is_bounded(
    server: Serve, metrics: Callable[[], Metrics], pids: tuple[int, int]
) -> None:
    before = metrics()
    fresh = [server.memory_when_ready[pid] for pid in pids]
    sizes: list[tuple[int, int]] = []
    tokens = 0
    for round_number in range(3):
        outcomes = run_streams(server.url, _bodies(round_number))
        ended = time.monotonic()
        bad = [outcome for outcome in outcomes if not outcome.complete]
        assert not bad, bad[:3]
        tokens += sum(len(outcome.token_ids) for outcome in outcomes)
        _freed(metrics, ended)
        sizes.append((server.memory(pids[0]), server.memory(pids[1])))
        print(f"round {round_number}: router {sizes[-1][0] // MIB} MiB, rank {sizes[-1][1] // MIB} MiB")
    after = metrics()
    assert tokens == 3 * COUNT * OUTPUT
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] == tokens
    assert after.count("headrace_request_errors_total") == before.count("headrace_request_errors_total")
    assert sizes[-1][0] - fresh[0] < ROUTER_MIB * MIB
    assert sizes[-1][1] - fresh[1] < RANK_MIB * MIB


def test_all_disconnect_at_once(server: Serve, metrics: Callable[[], Metrics]) -> None:
    """In every phase: some are queued, some prefill, some decode; no request would end by itself."""
    for seconds in (0.3, 3.0):
        outcomes = run_streams(server.url, _bodies(11, tokens=500), drop_after=seconds)
        ended = time.monotonic()
        assert all(outcome.dropped for outcome in outcomes)
        _freed(metrics, ended)
    assert run_streams(server.url, _bodies(12)[:1])[0].complete
