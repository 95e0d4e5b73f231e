"""What both ends of a transfer stream need: this replica's hello, the check of the other's, and frames."""

import itertools
from collections.abc import Callable

import msgspec

from headrace_proto import CONTRACT_VERSION, is_compatible
from headrace_proto import replica_pb2 as pb
from headrace_worker.assembly.command_queue import CommandQueue
from headrace_worker.core.transfer.messages import FromSource, ToSource
from headrace_worker.core.transfer.orders import Connect
from headrace_worker.core.transfer.shards import KvShards, mismatch, plan_routes

_encode = msgspec.msgpack.Encoder().encode
_to_shards = msgspec.msgpack.Decoder(KvShards | None).decode
_to_source: Callable[[bytes], ToSource] = msgspec.msgpack.Decoder(ToSource).decode
_from_source: Callable[[bytes], FromSource] = msgspec.msgpack.Decoder(FromSource).decode


class InvalidTransferError(Exception):
    """A peer cannot be used, or sent an invalid message."""


def frame(message: ToSource | FromSource) -> pb.TransferFrame:
    return pb.TransferFrame(message=_encode(message))


def to_source(received: pb.TransferFrame) -> ToSource:
    """Raises InvalidTransferError."""
    try:
        return _to_source(received.message)
    except msgspec.DecodeError as error:
        raise InvalidTransferError(f"a message is invalid: {error}") from error


def from_source(received: pb.TransferFrame) -> FromSource:
    """Raises InvalidTransferError."""
    try:
        return _from_source(received.message)
    except msgspec.DecodeError as error:
        raise InvalidTransferError(f"a message is invalid: {error}") from error


class TransferPeer:
    """This replica, as others see it. Numbers of peers in orders are its own."""

    def __init__(
        self, identity: Callable[[], pb.ReplicaIdentity], shards: KvShards | None, commands: CommandQueue
    ) -> None:
        """shards: None if nothing can be read here."""
        self.commands = commands
        self._identity = identity
        self._shards = shards
        self._numbers = itertools.count(1)

    def hello(self) -> pb.TransferFrame:
        """The first frame."""
        hello = pb.TransferHello(
            contract_version=CONTRACT_VERSION, identity=self._identity(), shards=_encode(self._shards)
        )
        return pb.TransferFrame(hello=hello)

    def connect(self, first: pb.TransferFrame, *, reads: bool) -> Connect:
        """The order to connect to the ranks of the replica whose first frame this is, as its target if `reads`.

        Raises InvalidTransferError with the reason why neither can use blocks of the other.
        """
        hello = first.hello
        if not first.HasField("hello") or not is_compatible(hello.contract_version):
            raise InvalidTransferError(
                f"the first frame must be a hello; contract versions may differ from {CONTRACT_VERSION} by one"
            )
        try:
            other = _to_shards(hello.shards)
        except msgspec.DecodeError as error:
            raise InvalidTransferError(f"its shards are invalid: {error}") from error
        reason = self._find_mismatch(hello.identity, other)
        if reason or other is None or self._shards is None:
            raise InvalidTransferError(reason)
        source, target = (other, self._shards) if reads else (self._shards, other)
        return Connect(next(self._numbers), other.ranks, tuple(plan_routes(source, target)), reads)

    def _find_mismatch(self, other: pb.ReplicaIdentity, shards: KvShards | None) -> str:
        mine = self._identity()
        for field in ("model", "revision", "dtype", "kv_dtype"):
            if getattr(mine, field) != getattr(other, field):
                return f"the other replica has another {field.replace('_', ' ')}"
        if mine.boot_id == other.boot_id:
            return "a replica does not fetch from itself"
        if self._shards is None or shards is None:
            return "one of the two replicas has no NIXL"
        return mismatch(self._shards, shards)
