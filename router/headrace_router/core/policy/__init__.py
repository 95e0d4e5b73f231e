"""Placement policies: one file each, behind one method."""

from headrace_router.core.policy.interface import Candidate, Policy, Work
from headrace_router.core.policy.least_load import LeastLoad
from headrace_router.core.policy.round_robin import RoundRobin

__all__ = ["Candidate", "LeastLoad", "Policy", "RoundRobin", "Work", "policy_by_name"]


def policy_by_name(name: str) -> Policy:
    """The policy with this name in the config."""
    policies: dict[str, type[Policy]] = {"least-load": LeastLoad, "round-robin": RoundRobin}
    return policies[name]()
