"""The sources of a target: which are connected, how fast they are, and which it avoids for a while. Pure."""

from collections.abc import Collection
from dataclasses import dataclass, field

from headrace_worker.core.transfer.fetch import FetchLimits

_OLDER = 0.8  # weight of earlier chunks beside the newest one


@dataclass(slots=True)
class _Peer:
    number: int | None = None  # once a Connect was ordered
    avoid_until: float = 0.0
    renewed: dict[int, float] = field(default_factory=dict)  # when renewals were sent that are not answered yet
    next_renewal: float = 0.0
    step_seconds: float = 0.0  # that a step of it may take
    confirmed: float = 0.0  # when the newest message was sent that the source is known to have
    reads: dict[int, tuple[float, float]] = field(default_factory=dict)  # recent seconds and blocks, by rank
    measured: float = 0.0


class SourcePeers:
    """By address. Times are seconds of the caller's clock."""

    def __init__(self, limits: FetchLimits) -> None:
        self._limits = limits
        self._peers: dict[str, _Peer] = {}
        self._renewals = 0

    def number(self, peer: str) -> int | None:
        """In orders, of a source that is connected."""
        known = self._peers.get(peer)
        return known.number if known is not None else None

    def use(self, peer: str, now: float, step_seconds: float) -> bool:
        """Whether the next message may be sent to this source. Forgets those that are of no use any more.

        step_seconds: that a step may take there, until it says so itself.
        """
        for name, each in list(self._peers.items()):
            if each.number is None and 0 < each.avoid_until <= now:
                del self._peers[name]
        known = self._peers.setdefault(peer, _Peer())
        known.step_seconds = known.step_seconds or step_seconds
        return now >= known.avoid_until

    def connected(self, peer: str, number: int) -> None:
        """The source is connected."""
        self._peers.setdefault(peer, _Peer()).number = number

    def lose(self, peer: str, now: float) -> int | None:
        """The source is avoided for a while; returns its number, if it was connected."""
        known = self._peers.get(peer)
        if known is None:
            return None
        number = known.number
        self._peers[peer] = _Peer(avoid_until=max(known.avoid_until, now + self._limits.avoid))
        return number

    def avoid(self, peer: str, now: float, seconds: float) -> None:
        """The source is not used for a while; it stays connected."""
        if (known := self._peers.get(peer)) is not None:
            known.avoid_until = max(known.avoid_until, now + seconds)

    def renewals(self, used: Collection[str], now: float) -> list[tuple[str, int]]:
        """The sources of running fetches to which a renewal is due, once each time, and its number."""
        due = []
        for peer in used:
            known = self._peers[peer]
            if now >= known.next_renewal:
                self._renewals += 1
                known.renewed[self._renewals] = now
                known.next_renewal = now + self._limits.renew
                due.append((peer, self._renewals))
        return due

    def set_step(self, peer: str, seconds: float) -> None:
        """The source says how long a step may take there; 0 = it does not know."""
        if seconds and (known := self._peers.get(peer)) is not None:
            known.step_seconds = seconds

    def answered(self, peer: str, number: int) -> None:
        """The source has a renewal, and hence all before it."""
        if (known := self._peers.get(peer)) is not None and number in known.renewed:
            known.confirmed = known.renewed[number]
            known.renewed = {other: sent for other, sent in known.renewed.items() if other > number}

    def silence(self, peer: str, since: float, now: float) -> float:
        """Seconds since the newest message that this source is known to have. since: one of its fetches was sent."""
        known = self._peers.get(peer)
        return now - max(since, known.confirmed if known is not None else 0.0)

    def patience(self, peer: str) -> float:
        """The silence after which a source counts as stalled."""
        known, limits = self._peers.get(peer), self._limits
        steps = known.step_seconds if known is not None else 0.0
        return min(max(limits.silence, limits.silent_steps * steps), limits.max_silence)

    def read(self, peer: str, rank: int, blocks: int, seconds: float, now: float) -> None:
        """A rank has read a chunk."""
        if (known := self._peers.get(peer)) is not None and blocks > 0:
            spent, done = known.reads.get(rank, (0.0, 0.0))
            known.reads[rank] = _OLDER * spent + seconds, _OLDER * done + blocks
            known.measured = now

    def block_seconds(self, peer: str, now: float) -> float:
        """Of a source; 0 = not known."""
        return dict(self.speeds(now)).get(peer, 0.0)

    def speeds(self, now: float) -> list[tuple[str, float]]:
        """The sources of which the seconds per block are known: those of the slowest rank, since all must read."""
        return [
            (peer, max(spent / done for spent, done in known.reads.values()))
            for peer, known in self._peers.items()
            if known.reads and now - known.measured < self._limits.speed_seconds
        ]
