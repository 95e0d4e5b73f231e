"""Traces through simulated replicas: production's decisions in virtual time."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from headrace_cluster.simulator.cluster_change import Add, Drain, Kill, Slow, read_changes
from headrace_cluster.simulator.errors import SimulationError
from headrace_cluster.simulator.generated import generated
from headrace_cluster.simulator.latency_model import LatencyModel, latency_model
from headrace_cluster.simulator.result import Result, Slo, result_of
from headrace_cluster.simulator.simulation import Setup, Simulation
from headrace_cluster.simulator.trace import PRIVATE, Trace, TraceRequest
from headrace_router.core.account import Cause

H200 = latency_model("h200-8b")


def simulated(trace: Trace, latency: LatencyModel = H200, **options: Any) -> tuple[Simulation, Result]:
    simulation = Simulation(trace, Setup(latency, **options))
    simulation.run()
    for replica in simulation.replicas.values():
        replica.engine.scheduler.check(replica.engine.exchange.held())
    return simulation, result_of(simulation, Slo(), 1.0)


def test_a_seed_gives_the_same_run() -> None:
    trace = generated("chat", 60, 0)
    documents = []
    for seed in (1, 1, 2):
        document = simulated(trace, replicas=3, seed=seed)[1].document()
        documents.append({key: value for key, value in document.items() if key not in ("decision_ms", "seed", "setup")})
    assert documents[0] == documents[1] != documents[2]


@pytest.mark.parametrize("policy", ["predicted", "least-load", "round_robin", "session", "cache-aware", "overlap-cost"])
def test_every_policy_serves_every_request(policy: str) -> None:
    simulation, result = simulated(generated("chat", 40, 0), replicas=3, policy=policy)
    assert (result.requests, result.failed) == (40, 0)
    for request in simulation.requests:
        assert len(request.output_token_ids) == request.traced.output_tokens
        assert request.ttft is not None and request.ttft > 0
    assert 0 < result.hit_rate <= result.hit_rate_bound + 1e-9, "the caches are large"


def test_shared_prefixes_are_found_where_round_robin_finds_few() -> None:
    trace = generated("shared-prefix", 256, 0)
    ours, turns = (
        simulated(trace, replicas=8, cache_blocks=200, policy=name)[1] for name in ("predicted", "round-robin")
    )
    assert turns.hit_rate < 0.2
    assert ours.hit_rate > 3 * turns.hit_rate
    assert ours.seconds < turns.seconds


def test_a_hot_prefix_spreads() -> None:
    _, result = simulated(generated("hot-prefix", 400, 0), replicas=8)
    assert result.imbalance <= 1.3
    assert result.hit_rate > 0.9


def test_a_burst_of_siblings_is_computed_once_on_each_replica() -> None:
    _, result = simulated(generated("siblings", 64, 0), replicas=8)
    prompts = 64 * 4096 * (1 - result.hit_rate)
    assert prompts <= 8 * 4096 + 64 * 64


def test_several_routers_and_models() -> None:
    _, result = simulated(generated("hot-prefix", 300, 0), replicas=4, routers=4)
    assert (result.failed, result.routers) == (0, 4)
    assert result.imbalance <= 1.3
    simulation, result = simulated(generated("chat", 40, 0), replicas=2, models=2)
    assert result.failed == 0
    for number, request in enumerate(simulation.requests):
        assert request.replica.startswith(f"m{number % 2}-")


def test_prefill_replicas_compute_prompts() -> None:
    simulation, result = simulated(
        generated("hot-prefix", 60, 0), replicas=0, prefill=2, decode=2, disaggregation="always"
    )
    assert result.failed == 0 and result.transfers > 0 and result.prefilled > 0
    assert {request.replica for request in simulation.requests} == {"m0-r0", "m0-r1"}


def test_streams_continue_after_a_kill() -> None:
    trace = generated("chat", 60, 0).faster(10.0)
    changes = read_changes("kill:m0-r0@2+5,slow:m0-r1@3+5x4")
    simulation, result = simulated(trace, replicas=3, changes=changes)
    assert result.failed == 0
    assert any(request.placements > 1 for request in simulation.requests)
    assert simulation.replicas["m0-r0"].facts.identity.generation == 2


def test_changes_are_read() -> None:
    assert read_changes("kill:m0-r1@60+20,slow:m0-r2@30+60x4,slow:a@1+2,add:m0-r0@90,drain:m0-r3@9.5") == [
        Kill("m0-r1", 60, 20),
        Slow("m0-r2", 30, 60, 4),
        Slow("a", 1, 2),
        Add("m0-r0", 90),
        Drain("m0-r3", 9.5),
    ]
    for text in ("kill:r0", "stop:r0@1+2", "kill:r0@x+2", "kill:r0@1+2x3", "add:r0@1+2"):
        with pytest.raises(SimulationError, match="is no fault; write kill:REPLICA@"):
            read_changes(text)


def test_replicas_are_added_and_drained() -> None:
    trace = generated("chat", 200, 3)
    changes = read_changes("add:m0-r0@2,drain:m0-r1@3")
    simulation, result = simulated(trace, replicas=2, changes=changes)
    used = {request.replica for request in simulation.requests}
    assert result.failed == 0 and "m0-a1" in used
    assert not simulation.replicas["m0-r1"].alive
    late = [request for request in simulation.requests if request.began > 1.0 + 3.1]
    assert late and all(request.replica != "m0-r1" for request in late)


def _cause(requests: Sequence[TraceRequest], index: int = -1, replica: str = "m0", **options: Any) -> Cause:
    """The main cause of the time of one of the requests at that replica."""
    simulation, _ = simulated(Trace("injected", requests, 64, hashed=True), **options)
    request = [request for request in simulation.requests if request.replica.startswith(replica)][index]
    request.account.finish(request.last_token)
    return request.account.ranked()[0][0]


def _request(number: int, at: float, tokens: int, output: int) -> TraceRequest:
    first = PRIVATE + number * 10_000
    return TraceRequest(at, tokens, output, tuple(range(first, first + -(-tokens // 64))))


def test_the_cause_of_a_slow_answer_is_ranked_first() -> None:
    """What `headrace explain` shows; decoding itself is not ranked."""
    crowd = [_request(number, 0.0, 6_000, 16) for number in range(75)]
    assert _cause([*crowd, _request(999, 0.2, 300, 16)], replicas=1) is Cause.QUEUE
    assert _cause([_request(1, 0.0, 60_000, 8)], replicas=3) is Cause.PROMPT
    link = replace(H200, transfer_bandwidth=0.2e9)
    pools: dict[str, Any] = {"replicas": 0, "prefill": 1, "decode": 1, "disaggregation": "always"}
    assert _cause([_request(1, 0.0, 9_000, 16)], latency=link, **pools) is Cause.FETCH
    prompts = [_request(10 + number, 1.0 + number * 0.5, 60_000, 4) for number in range(6)]
    assert _cause([_request(1, 0.0, 300, 700), *prompts], index=0, replicas=1) is Cause.PROMPTS_BESIDE
    slow = (Slow("m0-r0", at=0.5, seconds=1000.0, factor=7.0),)
    streams = [_request(number, 0.02 * number, 300, 900) for number in range(6)]
    cause = _cause(streams, replica="m0-r0", replicas=3, policy="round-robin", changes=slow)
    assert cause is Cause.SLOW_REPLICA


@pytest.mark.parametrize(
    ("load", "options"),
    [
        ("chat", {"replicas": 3}),
        ("shared-prefix", {"replicas": 2, "cache_blocks": 400}),
        ("shared-prefix", {"replicas": 0, "prefill": 2, "decode": 2, "changes": (Kill("m0-r1", 0.5, 2.0),)}),
    ],
)
def test_causes_add_up_to_the_wall_time(load: str, options: dict[str, Any]) -> None:
    """Within 1 %, of requests of any kind: shared prefixes, pools, small caches, lost replicas."""
    simulation, _ = simulated(generated(load, 150, 3), **options)
    for request in simulation.requests:
        request.account.finish(request.last_token)
        wall = request.last_token - request.began
        assert abs(sum(request.account.parts.values()) - wall) <= 0.01 * wall
