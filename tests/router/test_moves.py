"""Which replica computes a prompt, and from which replica a stream moves: pure decisions from loads."""

import random
from collections.abc import Sequence
from math import inf
from typing import Any

import pytest

from headrace_proto.replica_pb2 import Load, SourceSpeed, StepModel
from headrace_router.core.policy import predicted as disaggregate
from headrace_router.core.policy.interface import Mode
from headrace_router.core.policy.predicted import LEAST_TOKENS
from headrace_router.core.policy.rebalance import (
    PAUSE_SECONDS,
    Rebalancer,
)
from support.router.candidates import FakeCandidate as Replica
from support.router.candidates import view_of, work


def load(rate_ms: float = 1.0, **fields: Any) -> Load:
    return Load(step_model=StepModel(per_prefill_token_ms=rate_ms), **fields)


def choose_source(tokens: int, target: Replica, sources: Sequence[Replica], mode: Mode = "auto") -> int | None:
    of = work(tokens, [0], sources_cached=[0] * len(sources), mode=mode)
    return disaggregate.choose_source(view_of([target]), 0, view_of(sources), of)


def test_the_target_computes_a_short_prompt() -> None:
    assert choose_source(LEAST_TOKENS - 1, Replica(load(running=50)), [Replica(load())]) is None
    assert choose_source(LEAST_TOKENS, Replica(load(running=50)), [Replica(load())]) == 0
    assert choose_source(1000, Replica(load(running=50)), []) is None


def test_a_replica_without_a_prediction_counts_like_the_other() -> None:
    prompt = 500
    for rate, other in ((0.0, 1.0), (1.0, 0.0), (0.0, 0.0)):
        assert choose_source(prompt, Replica(load(rate)), [Replica(load(other))]) is None
        assert choose_source(prompt, Replica(load(rate, running=1)), [Replica(load(other))]) == 0
        assert (
            choose_source(prompt, Replica(load(rate, running=1)), [Replica(load(other), remote_prompt_tokens=5000)])
            is None
        )


def test_a_source_with_a_slow_link_is_not_used() -> None:
    """Of a large model the transfer may take longer than the prompt: as measured by each pair, never a constant."""
    prompt = 500
    slow, fast = Replica(load(), address="10.0.0.2:1"), Replica(load(), address="10.0.0.3:1")
    speeds = [SourceSpeed(address=slow.address, per_token_ms=20.0), SourceSpeed(address=fast.address, per_token_ms=0.1)]
    target = Replica(load(running=4, sources=speeds))
    assert choose_source(prompt, target, [slow]) is None
    assert choose_source(prompt, target, [slow, fast]) == 1
    unknown = Replica(load(), address="10.0.0.4:1")
    assert choose_source(prompt, target, [unknown]) == 0, "the fastest known one counts"
    assert choose_source(prompt, Replica(load(running=4, sources=speeds[:1])), [unknown]) is None
    assert choose_source(prompt, Replica(load(running=4, sources=speeds[1:])), [slow]) == 0


def test_a_source_is_used_when_streams_run() -> None:
    prompt = 500
    assert choose_source(prompt, Replica(load()), [Replica(load())]) is None, "an idle target needs no transfer"
    assert choose_source(prompt, Replica(load(running=1)), [Replica(load())]) == 0
    queued = Replica(load(waiting_tokens=5000))
    assert choose_source(prompt, queued, [Replica(load())]) is None, "its first token waits for that queue anyway"
    assert choose_source(prompt, Replica(load(), unreported=1, unreported_tokens=300), [Replica(load())]) == 0, (
        "a burst"
    )
    assert choose_source(prompt, Replica(load(running=1)), [Replica(load(waiting_tokens=5000))]) is None
    assert choose_source(prompt, Replica(load(running=1)), [Replica(load(), remote_prompt_tokens=5000)]) is None, (
        "assigned there already"
    )
    assert choose_source(prompt, Replica(load(running=1)), [Replica(load(5.0))]) is None, "a slow source"


def test_the_modes_that_an_operator_sets() -> None:
    prompt, idle, slow = 500, Replica(load()), Replica(load(1.9))
    assert choose_source(prompt, idle, [slow], "always") == 0
    assert choose_source(prompt, idle, [slow, Replica(load())], "always") == 1
    assert choose_source(LEAST_TOKENS - 1, idle, [slow], "always") is None
    assert choose_source(prompt, idle, [], "always") is None
    assert choose_source(prompt, Replica(load(running=50)), [Replica(load())], "off") is None


def test_the_source_with_the_shortest_queue_is_chosen() -> None:
    sources = [
        Replica(load(waiting_tokens=900)),
        Replica(load(waiting_tokens=100)),
        Replica(load(), remote_prompt_tokens=500),
    ]
    assert choose_source(500, Replica(load(running=9)), sources) == 1


def busy(
    name: str, running: int = 8, waiting: int = 0, usage: float = 0.95, step: float = 10, preempted_at: float = -inf
) -> Replica:
    load = Load(running=running, waiting=waiting, kv_usage=usage, predicted_step_ms=step)
    return Replica(load, replica_id=name, preempted_at=preempted_at)


def test_streams_move_from_a_replica_where_requests_wait_for_memory() -> None:
    assert Rebalancer().choose_moves(view_of([busy("a", waiting=2), busy("b", usage=0.3)]), 0.0) == [(0, 1)]
    assert Rebalancer().choose_moves(view_of([busy("a", waiting=2), busy("b", usage=0.8)]), 0.0) == [], (
        "no free memory there"
    )
    assert Rebalancer().choose_moves(view_of([busy("a", waiting=2), busy("b", usage=0.3, waiting=1)]), 0.0) == [], (
        "requests wait there, too"
    )
    assert Rebalancer().choose_moves(view_of([busy("a", waiting=2, usage=0.4), busy("b", usage=0.3)]), 0.0) == [], (
        "about the same usage"
    )
    assert Rebalancer().choose_moves(view_of([busy("a", waiting=2, running=1), busy("b", usage=0.1)]), 0.0) == [], (
        "its only stream"
    )


def test_streams_move_from_a_replica_that_preempts() -> None:
    members = view_of([busy("a", preempted_at=1.0), busy("b", usage=0.1)])
    assert Rebalancer().choose_moves(members, 1.0 + PAUSE_SECONDS) == [(0, 1)]
    assert Rebalancer().choose_moves(members, 1.1 + PAUSE_SECONDS) == [], "too long ago"


def test_streams_move_from_a_replica_with_slow_steps() -> None:
    slow, quick = busy("a", running=12, usage=0.4, step=40), busy("b", running=1, usage=0.1, step=10)
    assert Rebalancer().choose_moves(view_of([slow, quick]), 0.0) == [(0, 1)]
    assert Rebalancer().choose_moves(view_of([slow, busy("b", running=10, usage=0.1, step=10)]), 0.0) == []


@pytest.mark.parametrize("idle", [2, 5])
def test_one_stream_at_a_time_moves_to_the_least_loaded_replica(idle: int) -> None:
    rebalancer = Rebalancer()
    members = [busy("a", waiting=9), *(busy(f"b{n}", running=9 - n, usage=0.1) for n in range(idle))]
    assert rebalancer.choose_moves(view_of(members), 0.0) == [(0, idle)]
    assert rebalancer.choose_moves(view_of(members), PAUSE_SECONDS / 2) == []
    assert rebalancer.choose_moves(view_of(members), PAUSE_SECONDS) == [(0, idle)]


def test_the_streams_of_several_models_move() -> None:
    """The times of the replicas of other models are kept from one look to the next."""
    rebalancer = Rebalancer(random.Random(1).random)
    models = [view_of([busy(f"hot {n}", waiting=5), busy(f"idle {n}", usage=0.1)]) for n in range(3)]
    moves = [0, 0, 0]
    for tick in range(100):
        for index, view in enumerate(models):
            moves[index] += len(rebalancer.choose_moves(view, tick / 10))
    assert min(moves) >= 10
