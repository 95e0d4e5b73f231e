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
    block_seconds: float = 0.0  # of transfer, as the source measures it; 0 = not known
    measured: float = 0.0


class SourcePeers:
    """By address. Times are seconds of the caller's clock."""

    def __init__(self, limits: FetchLimits) -> None:
        self._limits = limits
        self._peers: dict[str, _Peer] = {}
        self._next_replacement = 0.0

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

    def replace(self, peer: str, used: Collection[str], now: float) -> tuple[str, int] | None:
        """If there are too many for one more: the connected one without a fetch for longest loses its place.

        Returns it and its pair, to be closed. None: there is a place, or there will be none for now.
        """
        if peer in self._peers or len(self._peers) < self._limits.sources or now < self._next_replacement:
            return None
        unused = [
            (known.used, name, known.pair)
            for name, known in self._peers.items()
            if known.pair is not None and name not in used and now - known.used >= self._limits.idle
        ]
        if not unused:
            return None
        self._next_replacement = now + self._limits.replace
        _, name, pair = min(unused)
        del self._peers[name]
        return name, pair

    def open(self, peer: str, pair: int) -> None:
        """The source is connected."""
        self._peers.setdefault(peer, _Peer()).pair = pair

    def lose(self, peer: str, now: float) -> int | None:
        """The source is avoided for a while; returns its pair, if it has one, which is to be closed."""
        known = self._peers.get(peer)
        if known is None:
            return None  # it was replaced meanwhile
        known.avoid_until = max(known.avoid_until, now + self._limits.avoid)
        pair, known.pair = known.pair, None
        return pair

    def avoid_silent(self, peer: str, now: float) -> None:
        """The source is not used for a while; it stays connected."""
        if (known := self._peers.get(peer)) is not None:
            known.avoid_until = max(known.avoid_until, now + self._limits.avoid_silent)

    def set_speed(self, peer: str, block_seconds: float, now: float) -> None:
        """The source has measured how long it takes to send a block here; 0 = not yet."""
        known = self._peers.get(peer)
        if known is not None and 0 < block_seconds < float("inf"):
            known.block_seconds, known.measured = block_seconds, now

    def block_seconds(self, peer: str, now: float) -> float:
        """Of a source; 0 = not known."""
        return dict(self.speeds(now)).get(peer, 0.0)

    def speeds(self, now: float) -> list[tuple[str, float]]:
        """The sources of which the seconds per block are known."""
        return [
            (peer, known.block_seconds)
            for peer, known in self._peers.items()
            if known.block_seconds and now - known.measured < self._limits.speed_seconds
        ]

    def renewals(self, used: Collection[str], now: float) -> list[str]:
        """The sources of running fetches to which a renewal is due, once each time."""
        due = [peer for peer in used if now - self._peers[peer].renewed >= self._limits.renew]
        for peer in due:
            self._peers[peer].renewed = now
        return due
