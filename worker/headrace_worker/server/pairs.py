"""What both ends of a transfer stream need: the replica's identity, its KV shards, and the commands to its engine."""

import itertools
from collections.abc import Callable

from headrace_proto import replica_pb2 as pb
from headrace_worker.assembly.command_queue import CommandQueue
from headrace_worker.comm.rendezvous import RendezvousHost
from headrace_worker.core.config import Rendezvous
from headrace_worker.core.transfer.orders import OpenPair
from headrace_worker.core.transfer.shards import KvShards, mismatch, plan_routes
from headrace_worker.server.transfer_convert import shards_message


class PairRegistry:
    """Creates the orders that open pairs. Pair numbers are local to this replica."""

    def __init__(
        self,
        identity: Callable[[], pb.ReplicaIdentity],
        shards: KvShards,
        commands: CommandQueue,
        host: str,
        set_rendezvous_host: Callable[[int, RendezvousHost], None],
    ) -> None:
        """`set_rendezvous_host` is called with a pair's rendezvous before its order."""
        self.shards = shards
        self.commands = commands
        self._identity = identity
        self._host = host
        self._set_rendezvous_host = set_rendezvous_host
        self._numbers = itertools.count(1)

    @property
    def identity(self) -> pb.ReplicaIdentity:
        return self._identity()

    @property
    def shards_message(self) -> pb.KvShards:
        return shards_message(self.shards)

    def find_mismatch(self, other: pb.ReplicaIdentity, shards: KvShards) -> str:
        """Why this replica cannot use blocks of the other one; empty when it can."""
        mine = self.identity
        for field in ("model", "revision", "dtype", "kv_dtype"):
            if getattr(mine, field) != getattr(other, field):
                return f"the other replica has another {field.replace('_', ' ')}"
        if mine.boot_id == other.boot_id:
            return "a replica does not fetch from itself"
        return mismatch(self.shards, shards)

    def open_rendezvous(self) -> RendezvousHost:
        """As the target: opens the rendezvous of both replicas. Blocks for a moment; raises RendezvousError."""
        return RendezvousHost(self._host)

    def as_target(self, opened: RendezvousHost, source: KvShards) -> OpenPair:
        """The order for this replica's ranks to connect to the source's."""
        number = next(self._numbers)
        self._set_rendezvous_host(number, opened)
        mine, theirs = len(self.shards.ranks), len(source.ranks)
        routes = tuple(plan_routes(source, self.shards))
        return OpenPair(number, opened.rendezvous, mine + theirs, 0, mine, routes, sends=False)

    def as_source(self, rendezvous: Rendezvous, target: KvShards) -> OpenPair:
        """The order for this replica's ranks to connect to the target's."""
        mine, theirs = len(self.shards.ranks), len(target.ranks)
        routes = tuple(plan_routes(self.shards, target))
        return OpenPair(next(self._numbers), rendezvous, mine + theirs, theirs, 0, routes, sends=True)
