"""The sources of a target: to which it is connected, and which it avoids for a while. Pure, bounded."""

from collections.abc import Collection
from dataclasses import dataclass

from headrace_worker.core.transfer.fetch import FetchLimits


@dataclass(slots=True)
class _Peer:
    pair: int | None = None  # once an OpenPair was ordered
    avoid_until: float = 0.0  # once it was lost; it is forgotten then
    renewed: float = 0.0
    used: float = 0.0  # for the last fetch


class SourcePeers:
    """By address. Times are seconds of the caller's clock."""

    def __init__(self, limits: FetchLimits) -> None:
        self._limits = limits
        self._peers: dict[str, _Peer] = {}

    def __len__(self) -> int:
        return len(self._peers)

    @property
    def pairs(self) -> set[int]:
        """The pairs that are connected."""
        return {known.pair for known in self._peers.values() if known.pair is not None}

    def pair(self, peer: str) -> int | None:
        """The pair of ranks that is connected to this source, if any."""
        known = self._peers.get(peer)
        return known.pair if known is not None else None

    def of_pair(self, pair: int) -> str | None:
        """The source of a pair."""
        return next((peer for peer, known in self._peers.items() if known.pair == pair), None)

    def use(self, peer: str, used: Collection[str], now: float) -> bool:
        """Whether the next message may connect to this source. Forgets lost ones when there is another one.

        used: those of running fetches.
        """
        known = self._peers.get(peer)
        if known is None:
            for name, each in list(self._peers.items()):
                if name not in used and each.pair is None and 0 < each.avoid_until <= now:
                    del self._peers[name]
            if len(self._peers) >= self._limits.sources:
                return False
            known = self._peers[peer] = _Peer()
        if now < known.avoid_until:
            return False
        known.avoid_until, known.used = 0.0, now
        return True

    def replaceable(self, peer: str, used: Collection[str], now: float) -> str | None:
        """If there are too many for one more: the connected one without a fetch for longest, to be closed."""
        if peer in self._peers or len(self._peers) < self._limits.sources:
            return None
        unused = {
            name: known.used
            for name, known in self._peers.items()
            if known.pair is not None and name not in used and now - known.used >= self._limits.idle
        }
        return min(unused, key=lambda name: unused[name], default=None)

    def open(self, peer: str, pair: int) -> None:
        """The source is connected."""
        self._peers.setdefault(peer, _Peer()).pair = pair

    def lose(self, peer: str, now: float) -> int | None:
        """The source is avoided for a while; returns its pair, which is to be closed."""
        known = self._peers.setdefault(peer, _Peer())
        known.avoid_until = now + self._limits.avoid
        pair, known.pair = known.pair, None
        return pair

    def renewals(self, used: Collection[str], now: float) -> list[str]:
        """The sources of running fetches to which a renewal is due, once each time."""
        due = [peer for peer in used if now - self._peers[peer].renewed >= self._limits.renew]
        for peer in due:
            self._peers[peer].renewed = now
        return due
