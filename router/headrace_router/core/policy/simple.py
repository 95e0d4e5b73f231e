"""Policies that predict nothing: the fewest requests, each replica in turn, one replica per session.

`session` keeps all requests of a session on one replica, as long as it is there, by rendezvous hashing (Thaler
and Ravishankar, 1998): each replica has a weight for the session, and the largest one wins.
A replica that leaves moves its own sessions only, and all routers choose the same one without messages between them.
"""

from abc import abstractmethod
from hashlib import blake2b

import numpy as np

from headrace_router.core.policy.interface import PlacementTask, Policy, RequestPlacement, View, first_after
from headrace_router.core.policy.predicted import choose_source


class ChosenTarget(Policy):
    """Chooses the replica that decodes; whether another one computes the prompt is predicted for it."""

    @abstractmethod
    def choose(self, view: View, work: PlacementTask) -> int:
        """The index of the best of at least one candidate."""

    def plan(self, view: View, sources: View, work: PlacementTask) -> RequestPlacement:
        target = self.choose(view, work)
        return RequestPlacement(target, choose_source(view, target, sources, work))


class LeastLoad(ChosenTarget):
    """Fewest requests running, waiting or sent but not reported; then most free KV memory.

    Ties are broken in rotation, so that equal replicas share evenly even when each request ends before the next begins.
    """

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, view: View, work: PlacementTask) -> int:
        self._turn += 1
        cost = view.requests + np.minimum(np.round(view.of("kv_usage"), 2), 0.99)
        return first_after(cost == cost.min(), self._turn)


class RoundRobin(ChosenTarget):
    """Takes turns."""

    def __init__(self) -> None:
        self._turn = -1

    def choose(self, view: View, work: PlacementTask) -> int:
        self._turn += 1
        return self._turn % len(view)


class Session(LeastLoad):
    """Requests without a session go to the replica with the fewest requests."""

    def choose(self, view: View, work: PlacementTask) -> int:
        session = work.request.session
        if not session:
            return super().choose(view, work)
        weights = [_weight(session, candidate.replica_id) for candidate in view.candidates]
        return weights.index(max(weights))


def _weight(session: str, replica_id: str) -> bytes:
    return blake2b(session.encode(), key=blake2b(replica_id.encode(), digest_size=32).digest(), digest_size=8).digest()
