"""What the replicas of a setup can serve with the simplest policy: the unit in which loads are stated."""

from collections.abc import Callable
from dataclasses import replace
from statistics import mean

from headrace_cluster.simulator.simulation import WARM_UP_SECONDS, Setup, Simulation
from headrace_cluster.simulator.trace import Trace

SAMPLE = 2000  # requests


def round_robin_capacity(
    trace: Trace, setup: Setup, progress: Callable[[Simulation], None] = lambda simulation: None
) -> float:
    """Requests per second, of the trace's first ones, that come faster than they are served.

    Of each replica until it has served its last one: at the end of the run some have nothing to do any more.
    progress: called now and then.
    """
    sample = trace.first(SAMPLE)
    flood = sample.faster(max(1.0, sample.seconds * 100.0))
    simulation = Simulation(flood, replace(setup, policy="round-robin", routers=1, changes=()))
    simulation.run(lambda ended: progress(simulation))
    ends: dict[str, float] = {}
    for request in simulation.requests:
        ends[request.replica] = max(ends.get(request.replica, 0.0), request.last_token - WARM_UP_SECONDS)
    return len(simulation.requests) / max(1e-9, mean(ends.values()))
