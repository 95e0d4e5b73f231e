"""Seconds until KV blocks of another replica have arrived, from the transfers that each pair has measured.

For a pair without recent transfers the fastest of the target's other pairs counts, or a guess: the first transfer shows
its own.
"""

import numpy as np

from headrace_router.core.policy.candidate import Candidate
from headrace_router.core.policy.view import Column, View

TRANSFER_SECONDS = 0.005  # the fetch request, and the transfer of the last layer
GUESS_SHARE = 0.1  # of the seconds of computing the same tokens, until the target has fetched from any source


class PairSpeeds:
    """Of one target, with each other replica."""

    def __init__(self, target: Candidate) -> None:
        self._known = {speed.address: speed.per_token_ms / 1e3 for speed in target.load.sources}
        self._fastest = min(self._known.values(), default=0.0)

    def per_token(self, peer: Candidate) -> float:
        """Seconds; 0 = not known."""
        return self._known.get(peer.address, self._fastest)


def transfer_seconds(target: Candidate, sources: View, tokens: int, computed: Column) -> Column:
    """That a prompt arrives at the target after each source has computed it, which takes so many seconds.

    Layers are sent while the next ones are computed.
    """
    speeds = PairSpeeds(target)
    known = np.array([speeds.per_token(source) for source in sources.candidates])
    more: Column = np.where(known > 0, np.maximum(tokens * known - computed, 0.0), computed * GUESS_SHARE)
    return more + TRANSFER_SECONDS


def fetch_seconds(target: Candidate, holder: Candidate, tokens: int, per_prefill_token: float) -> float:
    """Of so many cached tokens. per_prefill_token: seconds of the target."""
    per_token = PairSpeeds(target).per_token(holder) or GUESS_SHARE * per_prefill_token
    return TRANSFER_SECONDS + tokens * per_token
