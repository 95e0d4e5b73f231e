"""Which replica computes a prompt, and from which replica a stream moves: pure decisions from loads."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from headrace_proto.replica_pb2 import Counters, Load, SourceSpeed, StepModel
from headrace_router.core.policy.disaggregate import LEAST_TOKENS, choose_source
from headrace_router.core.policy.rebalance import PAUSE_SECONDS, Rebalancer


@dataclass
class Replica:
    load: Load = field(default_factory=Load)
    remote_prompt_tokens: int = 0
    replica_id: str = "r"
    address: str = "10.0.0.1:1"
    generation: int = 1
    unreported: int = 0
    unreported_tokens: int = 0
    kv_tokens: float = 0.0
    rows: int = 0
    step_tokens: int = 0

    @property
    def build(self) -> tuple[str, int]:
        return self.replica_id, self.generation


def load(rate_ms: float = 1.0, **fields: Any) -> Load:
    return Load(step_model=StepModel(per_prefill_token_ms=rate_ms), **fields)


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


def test_a_source_is_used_when_streams_run_or_its_queue_is_shorter() -> None:
    prompt = 500
    assert choose_source(prompt, Replica(load()), [Replica(load())]) is None, "an idle target needs no transfer"
    assert choose_source(prompt, Replica(load(running=1)), [Replica(load())]) == 0
    assert choose_source(prompt, Replica(load(waiting_tokens=5000)), [Replica(load())]) == 0
    assert choose_source(prompt, Replica(load(), unreported=1, unreported_tokens=300), [Replica(load())]) == 0, (
        "a burst"
    )
    assert choose_source(prompt, Replica(load(running=1)), [Replica(load(waiting_tokens=5000))]) is None
    assert choose_source(prompt, Replica(load(running=1)), [Replica(load(), remote_prompt_tokens=5000)]) is None, (
        "assigned there already"
    )
    assert choose_source(prompt, Replica(load(running=1)), [Replica(load(5.0))]) is None, "a slow source"


def test_the_modes_that_an_operator_sets() -> None:
    prompt, idle, slow = 500, Replica(load()), Replica(load(5.0))
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
    name: str, running: int = 8, waiting: int = 0, usage: float = 0.95, step: float = 10, preempted: int = 0
) -> Replica:
    return Replica(
        Load(
            running=running,
            waiting=waiting,
            kv_usage=usage,
            predicted_step_ms=step,
            counters=Counters(preemptions=preempted),
        ),
        replica_id=name,
    )


def test_streams_move_from_a_replica_where_requests_wait_for_memory() -> None:
    assert Rebalancer().choose_moves([busy("a", waiting=2), busy("b", usage=0.3)], 0.0) == [(0, 1)]
    assert Rebalancer().choose_moves([busy("a", waiting=2), busy("b", usage=0.8)], 0.0) == [], "no free memory there"
    assert Rebalancer().choose_moves([busy("a", waiting=2), busy("b", usage=0.3, waiting=1)], 0.0) == [], (
        "requests wait there, too"
    )
    assert Rebalancer().choose_moves([busy("a", waiting=2, usage=0.4), busy("b", usage=0.3)], 0.0) == [], (
        "about the same usage"
    )
    assert Rebalancer().choose_moves([busy("a", waiting=2, running=1), busy("b", usage=0.1)], 0.0) == [], (
        "its only stream"
    )


def test_streams_move_from_a_replica_that_preempts() -> None:
    rebalancer = Rebalancer()
    assert rebalancer.choose_moves([busy("a", preempted=5), busy("b", usage=0.1)], 0.0) == [], "an earlier one"
    assert rebalancer.choose_moves([busy("a", preempted=6), busy("b", usage=0.1)], 0.1) == [(0, 1)]
    assert rebalancer.choose_moves([busy("a", preempted=6), busy("b", usage=0.1)], 1.0) == []


def test_streams_move_from_a_replica_with_slow_steps() -> None:
    slow, quick = busy("a", running=12, usage=0.4, step=40), busy("b", running=1, usage=0.1, step=10)
    assert Rebalancer().choose_moves([slow, quick], 0.0) == [(0, 1)]
    assert Rebalancer().choose_moves([slow, busy("b", running=10, usage=0.1, step=10)], 0.0) == []


@pytest.mark.parametrize("idle", [2, 5])
def test_one_stream_at_a_time_moves_to_the_least_loaded_replica(idle: int) -> None:
    rebalancer = Rebalancer()
    members = [busy("a", waiting=9), *(busy(f"b{n}", running=9 - n, usage=0.1) for n in range(idle))]
    assert rebalancer.choose_moves(members, 0.0) == [(0, idle)]
    assert rebalancer.choose_moves(members, PAUSE_SECONDS / 2) == []
    assert rebalancer.choose_moves(members, PAUSE_SECONDS) == [(0, idle)]
