"""What both ends of a transfer stream need: who this replica is, how its ranks share blocks, and its step loop."""

import itertools
from collections.abc import Callable

from headrace_proto import replica_pb2 as pb
from headrace_worker.config import Meeting
from headrace_worker.loop import EngineLoop
from headrace_worker.parallel.meeting import MeetingHost
from headrace_worker.server.transfer_convert import shards_message
from headrace_worker.transfer.orders import OpenPair
from headrace_worker.transfer.shards import KvShards, mismatch, plan_routes


class PairDesk:
    """Makes the orders that open pairs. Numbers of pairs are this replica's own."""

    def __init__(
        self,
        identity: Callable[[], pb.ReplicaIdentity],
        shards: KvShards,
        loop: EngineLoop,
        host: str,
        expect: Callable[[int, MeetingHost], None],
    ) -> None:
        """`expect`: told of the meeting that a pair's order will name, before the order."""
        self.shards = shards
        self.loop = loop
        self._identity = identity
        self._host = host
        self._expect = expect
        self._numbers = itertools.count(1)

    @property
    def identity(self) -> pb.ReplicaIdentity:
        return self._identity()

    @property
    def shards_message(self) -> pb.KvShards:
        return shards_message(self.shards)

    def unlike(self, other: pb.ReplicaIdentity, shards: KvShards) -> str:
        """Why blocks of the other replica are not blocks of this one; empty when they are."""
        mine = self.identity
        for field in ("model", "revision", "dtype", "kv_dtype"):
            if getattr(mine, field) != getattr(other, field):
                return f"the other replica has another {field.replace('_', ' ')}"
        if mine.boot_id == other.boot_id:
            return "a replica does not fetch from itself"
        return mismatch(self.shards, shards)

    def open_meeting(self) -> MeetingHost:
        """As the target: where both are to meet. Takes a moment; raises MeetingError."""
        return MeetingHost(self._host)

    def as_target(self, opened: MeetingHost, source: KvShards) -> OpenPair:
        """The order for this replica's ranks to meet the source's."""
        number = next(self._numbers)
        self._expect(number, opened)
        mine, theirs = len(self.shards.ranks), len(source.ranks)
        routes = tuple(plan_routes(source, self.shards))
        return OpenPair(number, opened.meeting, mine + theirs, 0, mine, routes, sends=False)

    def as_source(self, meeting: Meeting, target: KvShards) -> OpenPair:
        """The order for this replica's ranks to meet the target's."""
        mine, theirs = len(self.shards.ranks), len(target.ranks)
        routes = tuple(plan_routes(self.shards, target))
        return OpenPair(next(self._numbers), meeting, mine + theirs, theirs, 0, routes, sends=True)
