"""Skipping steps that only decode changes nothing: every request has the same times, on the same replica."""

from dataclasses import replace
from typing import Any

import pytest

from headrace_cluster.simulator.cluster_change import Kill, Slow
from headrace_cluster.simulator.generated import generated
from headrace_cluster.simulator.latency_model import latency_model
from headrace_cluster.simulator.result import Slo, result_of
from headrace_cluster.simulator.simulation import Setup, Simulation

H200 = latency_model("h200-8b")
MEASURED = ("wall_seconds", "requests_per_minute", "decision_ms")  # of this machine

SETUPS = {
    "shared": ("shared-prefix", 40, Setup(H200, replicas=4)),
    "chat": ("chat", 50, Setup(H200, replicas=3, spread=0.2)),
    "small cache": ("shared-prefix", 120, Setup(H200, replicas=2, cache_blocks=160)),
    "sessions": ("chat", 60, Setup(H200, replicas=3, policy="session")),
    "pools": ("chat", 40, Setup(H200, replicas=0, prefill=1, decode=2)),
    "always": ("shared-prefix", 50, Setup(H200, replicas=0, prefill=1, decode=2, disaggregation="always")),
    "kill": (
        "chat",
        100,
        Setup(H200, replicas=3, changes=(Kill("m0-r1", 3.0, 4.0), Kill("m0-r0", 9.0, 2.0))),
    ),
    "slow": ("chat", 50, Setup(H200, replicas=3, changes=(Slow("m0-r1", 2.0, 20.0, 6.0),))),
}


def _run(name: str, *, skip: bool) -> tuple[list[Any], dict[str, Any], int]:
    load, count, setup = SETUPS[name]
    simulation = Simulation(generated(load, count, 0), replace(setup, skip=skip))
    simulation.run()
    requests = [
        (
            each.replica,
            each.placements,
            each.first_token,
            each.last_token,
            each.cached_tokens,
            each.predicted,
            tuple(each.output_token_ids),
            each.account.parts,
        )
        for each in simulation.requests
    ]
    document = result_of(simulation, Slo(), 1.0).document()
    for field in MEASURED:
        del document[field]
    return requests, document, simulation.time.events


@pytest.mark.parametrize("name", SETUPS)
def test_a_run_is_the_same(name: str) -> None:
    requests, document, events = _run(name, skip=True)
    stepped, expected, more_events = _run(name, skip=False)
    assert requests == stepped
    assert document == expected
    assert events < more_events
    assert document["preemptions"] > 0 or name != "small cache"
