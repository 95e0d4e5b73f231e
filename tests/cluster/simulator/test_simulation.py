"""Traces through simulated replicas: production's decisions in virtual time."""

from dataclasses import replace
from typing import Any

import pytest

from headrace_cluster.simulator.cluster_change import Add, Drain, Kill, Slow, read_changes
from headrace_cluster.simulator.errors import SimulationError
from headrace_cluster.simulator.generated import generated
from headrace_cluster.simulator.latency_model import latency_model
from headrace_cluster.simulator.result import Result, Slo, result_of
from headrace_cluster.simulator.simulation import Setup, Simulation
from headrace_cluster.simulator.trace import Trace

H200 = latency_model("h200-8b")


def simulated(trace: Trace, **options: Any) -> tuple[Simulation, Result]:
    simulation = Simulation(trace, Setup(H200, **options))
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


def test_unknown_policies_are_refused() -> None:
    with pytest.raises(SimulationError, match=r"There is no policy 'best'; use predicted, "):
        Simulation(generated("chat", 4, 0), Setup(H200, policy="best"))


def test_shared_prefixes_are_found_where_round_robin_finds_few() -> None:
    trace = generated("shared-prefix", 512, 0)
    ours, turns = (
        simulated(trace, replicas=8, cache_blocks=400, policy=name)[1] for name in ("predicted", "round-robin")
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


def test_several_routers_share_the_replicas() -> None:
    trace = generated("hot-prefix", 300, 0)
    for routers in (2, 4):
        _, result = simulated(trace, replicas=4, routers=routers)
        assert (result.failed, result.routers) == (0, routers)
        assert result.imbalance <= 1.3


def test_several_models_have_their_own_replicas() -> None:
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


@pytest.mark.parametrize(
    "text", ["kill", "kill:r0", "stop:r0@1+2", "kill:r0@x+2", "kill:r0@1+2x3", "add:r0@1+2", "drain:r0"]
)
def test_a_wrong_fault_is_refused(text: str) -> None:
    with pytest.raises(SimulationError, match="is no fault; write kill:REPLICA@"):
        read_changes(text)


def test_a_request_that_fits_into_no_replica_is_refused() -> None:
    trace = generated("chat", 20, 0)
    with pytest.raises(SimulationError, match=r"pass --cache-blocks \d+ or more"):
        Simulation(trace, replace(Setup(H200), cache_blocks=4))


def test_replicas_are_added_and_drained() -> None:
    trace = generated("chat", 200, 3)
    changes = read_changes("add:m0-r0@2,drain:m0-r1@3")
    simulation, result = simulated(trace, replicas=2, changes=changes)
    used = {request.replica for request in simulation.requests}
    assert result.failed == 0 and "m0-a1" in used
    assert not simulation.replicas["m0-r1"].alive
    late = [request for request in simulation.requests if request.began > 1.0 + 3.1]
    assert late and all(request.replica != "m0-r1" for request in late)


def test_an_autoscaler_sees_and_changes_the_cluster() -> None:
    seen: list[int] = []

    def autoscale(simulation: Simulation) -> None:
        seen.append(len(simulation.replicas))
        if len(simulation.replicas) < 4:
            simulation.add_replica("m0-r0")

    setup = Setup(latency_model("h200-8b"), replicas=1, autoscaler=autoscale, autoscale_seconds=2.0)
    simulation = Simulation(generated("chat", 150, 3), setup)
    simulation.run()
    assert seen[:5] == [1, 2, 3, 4, 4]
    assert {request.replica for request in simulation.requests} == set(simulation.replicas)
