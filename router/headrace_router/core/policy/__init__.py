"""Placement policies: one file each, behind one method, and one line in `POLICIES`."""

from typing import TYPE_CHECKING, Literal

from headrace_router.core.policy.interface import Candidate, Policy, Work
from headrace_router.core.policy.least_load import LeastLoad
from headrace_router.core.policy.predicted import Predicted
from headrace_router.core.policy.round_robin import RoundRobin

__all__ = ["POLICIES", "Candidate", "LeastLoad", "Policy", "PolicyName", "Predicted", "RoundRobin", "Work"]

POLICIES: dict[str, type[Policy]] = {
    "predicted": Predicted,
    "least-load": LeastLoad,
    "round-robin": RoundRobin,
}
"""By the name in the configuration."""

if TYPE_CHECKING:
    PolicyName = str
else:
    PolicyName = Literal[tuple(POLICIES)]
