"""All requests of a session on one replica, as long as it is there.

Rendezvous hashing (Thaler and Ravishankar, 1998): each replica has a weight for the session, and the largest one wins.
A replica that leaves moves its own sessions only, and all routers choose the same one without messages between them.
"""

from hashlib import blake2b

from headrace_router.core.policy.interface import Work
from headrace_router.core.policy.least_load import LeastLoad
from headrace_router.core.policy.view import View


class Session(LeastLoad):
    """Requests without a session go to the replica with the fewest requests."""

    def choose(self, view: View, work: Work) -> int:
        session = work.request.session
        if not session:
            return super().choose(view, work)
        weights = [_weight(session, candidate.replica_id) for candidate in view.candidates]
        return weights.index(max(weights))


def _weight(session: str, replica_id: str) -> bytes:
    return blake2b(session.encode(), key=blake2b(replica_id.encode(), digest_size=32).digest(), digest_size=8).digest()
