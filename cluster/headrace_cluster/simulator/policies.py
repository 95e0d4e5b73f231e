"""The policies that a simulation can use: production's, and those of other routers to compare with."""

from headrace_cluster.simulator.cache_aware import CacheAware
from headrace_cluster.simulator.errors import SimulationError
from headrace_cluster.simulator.overlap_cost import OverlapCost
from headrace_router.core.policy import POLICIES, Policy

SIMULATED: dict[str, type[Policy]] = {**POLICIES, "cache-aware": CacheAware, "overlap-cost": OverlapCost}


def new_policy(name: str) -> Policy:
    """A new one. Raises SimulationError."""
    name = name.lower().replace("_", "-")
    if name not in SIMULATED:
        raise SimulationError(f"There is no policy '{name}'; use {', '.join(SIMULATED)}.")
    return SIMULATED[name]()
