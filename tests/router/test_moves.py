"""Who computes a prompt, and who should give a stream away: pure decisions from loads."""

from dataclasses import dataclass, field

import pytest

from headrace_proto.replica_pb2 import Counters, Load, StepModel
from headrace_router.policy.disaggregate import LEAST_TOKENS, Prompt, choose_source
from headrace_router.policy.rebalance import PAUSE_SECONDS, Rebalancer


@dataclass
class Place:
    load: Load = field(default_factory=Load)
    promised_tokens: int = 0
    replica_id: str = "r"
    unreported: int = 0
    unreported_tokens: int = 0


def load(rate_ms: float = 1.0, **fields: int) -> Load:
    return Load(step_model=StepModel(per_prefill_token_ms=rate_ms), **fields)


def test_a_short_prompt_stays() -> None:
    assert choose_source(Prompt(LEAST_TOKENS - 1), Place(load(running=50)), [Place(load())]) is None
    assert choose_source(Prompt(LEAST_TOKENS), Place(load(running=50)), [Place(load())]) == 0
    assert choose_source(Prompt(1000), Place(load(running=50)), []) is None


def test_who_has_computed_nothing_yet_counts_like_the_other() -> None:
    prompt = Prompt(500)
    for here, there in ((0.0, 1.0), (1.0, 0.0), (0.0, 0.0)):
        assert choose_source(prompt, Place(load(here)), [Place(load(there))]) is None
        assert choose_source(prompt, Place(load(here, running=1)), [Place(load(there))]) == 0
        assert choose_source(prompt, Place(load(here, running=1)), [Place(load(there), promised_tokens=5000)]) is None


def test_it_pays_when_streams_run_or_the_queue_is_shorter() -> None:
    prompt = Prompt(500)
    assert choose_source(prompt, Place(load()), [Place(load())]) is None, "an idle target needs no transfer"
    assert choose_source(prompt, Place(load(running=1)), [Place(load())]) == 0
    assert choose_source(prompt, Place(load(waiting_tokens=5000)), [Place(load())]) == 0
    assert choose_source(prompt, Place(load(), unreported=1, unreported_tokens=300), [Place(load())]) == 0, "a burst"
    assert choose_source(prompt, Place(load(running=1)), [Place(load(waiting_tokens=5000))]) is None
    assert choose_source(prompt, Place(load(running=1)), [Place(load(), promised_tokens=5000)]) is None, (
        "on its way there"
    )
    assert choose_source(prompt, Place(load(running=1)), [Place(load(5.0))]) is None, "a slow source"


def test_what_an_operator_decides() -> None:
    prompt, idle, slow = Prompt(500), Place(load()), Place(load(5.0))
    assert choose_source(prompt, idle, [slow], "always") == 0
    assert choose_source(prompt, idle, [slow, Place(load())], "always") == 1
    assert choose_source(Prompt(LEAST_TOKENS - 1), idle, [slow], "always") is None
    assert choose_source(prompt, idle, [], "always") is None
    assert choose_source(prompt, Place(load(running=50)), [Place(load())], "off") is None


def test_the_source_with_the_shortest_queue() -> None:
    sources = [Place(load(waiting_tokens=900)), Place(load(waiting_tokens=100)), Place(load(), promised_tokens=500)]
    assert choose_source(Prompt(500), Place(load(running=9)), sources) == 1


def busy(
    name: str, running: int = 8, waiting: int = 0, usage: float = 0.95, step: float = 10, preempted: int = 0
) -> Place:
    return Place(
        Load(
            running=running,
            waiting=waiting,
            kv_usage=usage,
            predicted_step_ms=step,
            counters=Counters(preemptions=preempted),
        ),
        replica_id=name,
    )


def test_streams_leave_where_requests_wait_for_memory() -> None:
    assert Rebalancer().look([busy("a", waiting=2), busy("b", usage=0.3)], 0.0) == [(0, 1)]
    assert Rebalancer().look([busy("a", waiting=2), busy("b", usage=0.8)], 0.0) == [], "no room there"
    assert Rebalancer().look([busy("a", waiting=2), busy("b", usage=0.3, waiting=1)], 0.0) == [], "they wait there too"
    assert Rebalancer().look([busy("a", waiting=2, usage=0.4), busy("b", usage=0.3)], 0.0) == [], "much the same"
    assert Rebalancer().look([busy("a", waiting=2, running=1), busy("b", usage=0.1)], 0.0) == [], "its only stream"


def test_streams_leave_where_they_are_preempted() -> None:
    rebalancer = Rebalancer()
    assert rebalancer.look([busy("a", preempted=5), busy("b", usage=0.1)], 0.0) == [], "that was before"
    assert rebalancer.look([busy("a", preempted=6), busy("b", usage=0.1)], 0.1) == [(0, 1)]
    assert rebalancer.look([busy("a", preempted=6), busy("b", usage=0.1)], 1.0) == []


def test_streams_leave_where_steps_are_slow() -> None:
    slow, quick = busy("a", running=12, usage=0.4, step=40), busy("b", running=1, usage=0.1, step=10)
    assert Rebalancer().look([slow, quick], 0.0) == [(0, 1)]
    assert Rebalancer().look([slow, busy("b", running=10, usage=0.1, step=10)], 0.0) == []


@pytest.mark.parametrize("idle", [2, 5])
def test_one_at_a_time_to_the_one_with_least_to_do(idle: int) -> None:
    rebalancer = Rebalancer()
    members = [busy("a", waiting=9), *(busy(f"b{n}", running=9 - n, usage=0.1) for n in range(idle))]
    assert rebalancer.look(members, 0.0) == [(0, idle)]
    assert rebalancer.look(members, PAUSE_SECONDS / 2) == []
    assert rebalancer.look(members, PAUSE_SECONDS) == [(0, idle)]
