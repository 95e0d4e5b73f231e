"""The sources of a target: which are connected, how fast they are, and which it avoids for a while. Pure."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace_worker.core.transfer.fetch import FetchLimits, patience

_OLDER = 0.8  # weight of earlier chunks beside the newest one

Reads = tuple[float, float, float]  # seconds, blocks, bytes


class SourceSpeed(NamedTuple):
    """How fast a source was read lately."""

    address: str
    block_seconds: float  # of the slowest rank: a block is there when all have read their part
    bytes_per_second: float  # of all ranks


@dataclass(slots=True)
class _Peer:
    number: int | None = None  # once a Connect was ordered
    avoid_until: float = 0.0
    renewed: dict[int, float] = field(default_factory=dict)  # when renewals were sent that are not answered yet
    next_renewal: float = 0.0
    step_seconds: float = 0.0  # that a step of it may take
    confirmed: float = 0.0  # when the newest message was sent that the source is known to have
    reads: dict[int, Reads] = field(default_factory=dict)  # recent ones, by rank
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
        """The source says how long a step may take there."""
        if (known := self._peers.get(peer)) is not None:
            known.step_seconds = seconds

    def answered(self, peer: str, number: int) -> None:
        """The source has a renewal, and hence all before it."""
        if (known := self._peers.get(peer)) is not None and number in known.renewed:
            known.confirmed = known.renewed[number]
            known.renewed = {other: sent for other, sent in known.renewed.items() if other > number}

    def is_silent(self, peer: str, since: float, now: float) -> bool:
        """Whether this source has not answered for too long. since: when one of its fetches was sent."""
        known = self._peers.get(peer, _Peer())
        return now - max(since, known.confirmed) > patience(known.step_seconds)

    def read(self, peer: str, rank: int, chunk: Reads, now: float) -> None:
        """A rank has read a chunk."""
        if (known := self._peers.get(peer)) is not None and chunk[1] > 0:
            seconds, blocks, size = known.reads.get(rank, (0.0, 0.0, 0.0))
            known.reads[rank] = _OLDER * seconds + chunk[0], _OLDER * blocks + chunk[1], _OLDER * size + chunk[2]
            known.measured = now

    def block_seconds(self, peer: str, now: float) -> float:
        """Of a source; 0 = not known."""
        return next((speed.block_seconds for speed in self.speeds(now) if speed.address == peer), 0.0)

    def speeds(self, now: float) -> list[SourceSpeed]:
        """Of the sources of which it is known."""
        return [
            SourceSpeed(
                peer,
                max(seconds / blocks for seconds, blocks, _ in known.reads.values()),
                sum(size / max(seconds, 1e-9) for seconds, _, size in known.reads.values()),
            )
            for peer, known in self._peers.items()
            if known.reads and now - known.measured < self._limits.speed_seconds
        ]
