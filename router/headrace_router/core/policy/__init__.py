"""Placement policies: one file each, behind one method, and one line in `POLICIES`."""

from typing import TYPE_CHECKING, Literal

from headrace_router.core.policy.interface import Candidate, PlacementTask, Policy, Prediction, RequestPlacement, View
from headrace_router.core.policy.predicted import Predicted
from headrace_router.core.policy.simple import LeastLoad, RoundRobin, Session

__all__ = [
    "POLICIES",
    "Candidate",
    "LeastLoad",
    "PlacementTask",
    "Policy",
    "PolicyName",
    "Predicted",
    "Prediction",
    "RequestPlacement",
    "RoundRobin",
    "Session",
    "View",
]

POLICIES: dict[str, type[Policy]] = {
    "predicted": Predicted,
    "least-load": LeastLoad,
    "round-robin": RoundRobin,
    "session": Session,
}
"""By the name in the configuration."""

if TYPE_CHECKING:
    PolicyName = str
else:
    PolicyName = Literal[tuple(POLICIES)]
