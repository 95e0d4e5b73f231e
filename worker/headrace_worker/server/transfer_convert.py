"""Conversion between protobuf transfer messages and plain data, with the checks of what a peer sends."""

from headrace_proto import replica_pb2 as pb
from headrace_worker.core.config import Rendezvous
from headrace_worker.core.transfer.messages import (
    Cancel,
    Commit,
    Done,
    Failed,
    FetchRequest,
    FromSource,
    Granted,
    Offer,
    Refused,
    Renew,
    ToSource,
)
from headrace_worker.core.transfer.shards import KvShards, RankShard

# Routes between the ranks of two replicas are planned on the event loop.
MAX_RANKS = 256
MAX_GROUPS = 32  # of layers with one attention span
MAX_LAYERS = 1 << 15  # over all ranks


class InvalidTransferError(Exception):
    """A peer sent an invalid message."""


def shards_message(shards: KvShards) -> pb.KvShards:
    return pb.KvShards(
        block_size=shards.block_size,
        head_dim=shards.head_dim,
        dtype=shards.dtype,
        windows=shards.windows,
        ranks=[
            pb.RankShard(
                groups=[pb.GroupLayers(layers=layers) for layers in rank.layers],
                first_head=rank.heads[0],
                stop_head=rank.heads[1],
            )
            for rank in shards.ranks
        ],
    )


def to_shards(message: pb.KvShards) -> KvShards:
    """Raises InvalidTransferError."""
    groups = len(message.windows)
    countable = len(message.ranks) <= MAX_RANKS and 0 < groups <= MAX_GROUPS
    if not countable or any(len(rank.groups) != groups for rank in message.ranks):
        raise InvalidTransferError(f"the peer's KV shards are invalid: {MAX_RANKS} ranks have a part of each group")
    if sum(len(group.layers) for rank in message.ranks for group in rank.groups) > MAX_LAYERS:
        raise InvalidTransferError(f"the peer's KV shards have more than {MAX_LAYERS} layers")
    ranks = tuple(
        RankShard(tuple(tuple(group.layers) for group in rank.groups), (rank.first_head, rank.stop_head))
        for rank in message.ranks
    )
    if not ranks or any(rank.heads[0] >= rank.heads[1] for rank in ranks):
        raise InvalidTransferError("the peer's KV shards are invalid: a rank holds no layers or heads")
    return KvShards(message.block_size, message.head_dim, message.dtype, tuple(message.windows), ranks)


def rendezvous_message(rendezvous: Rendezvous) -> pb.PairRendezvous:
    return pb.PairRendezvous(host=rendezvous.host, port=rendezvous.port, token=rendezvous.token)


def to_rendezvous(message: pb.PairRendezvous) -> Rendezvous:
    """Raises InvalidTransferError."""
    if len(message.token) != 32 or not message.host or not 0 < message.port < 65536:
        raise InvalidTransferError("the peer's rendezvous has no valid host, port or token")
    return Rendezvous(message.host, message.port, message.token)


def target_frame(message: ToSource) -> pb.TargetFrame:
    match message:
        case FetchRequest():
            request = pb.FetchRequest(
                fetch=message.fetch,
                tenant_salt=message.tenant_salt,
                adapter=message.adapter,
                token_ids=message.token_ids,
                held_blocks=message.held,
                cached_only=message.cached_only,
                priority=message.priority,
                timeout_ms=max(1, int(message.timeout * 1000)) if message.timeout else 0,
            )
            return pb.TargetFrame(request=request)
        case Cancel(fetch):
            return pb.TargetFrame(cancel=fetch)
        case Done(fetch):
            return pb.TargetFrame(done=fetch)
        case Renew():
            return pb.TargetFrame(renew=True)


def to_source_message(frame: pb.TargetFrame, *, max_model_len: int, vocab_size: int) -> ToSource:
    """Raises InvalidTransferError."""
    match frame.WhichOneof("message"):
        case "request":
            request = frame.request
            count = len(request.token_ids)
            if not 0 < count <= max_model_len or max(ids := list(request.token_ids)) >= vocab_size:
                raise InvalidTransferError("the tokens are not of this model's vocabulary or context length")
            return FetchRequest(
                request.fetch,
                request.tenant_salt,
                request.adapter,
                ids,
                request.held_blocks,
                request.cached_only,
                request.priority,
                request.timeout_ms / 1000,
            )
        case "cancel":
            return Cancel(frame.cancel)
        case "done":
            return Done(frame.done)
        case "renew":
            return Renew()
        case _:
            raise InvalidTransferError("the frame is empty")


def source_frame(message: FromSource) -> pb.SourceFrame:
    match message:
        case Granted(fetch, blocks, block_seconds):
            return pb.SourceFrame(granted=pb.FetchGrant(fetch=fetch, blocks=blocks, block_seconds=block_seconds))
        case Refused(fetch, reason):
            return pb.SourceFrame(refused=pb.FetchEnd(fetch=fetch, reason=reason))
        case Failed(fetch, reason):
            return pb.SourceFrame(failed=pb.FetchEnd(fetch=fetch, reason=reason))
        case Commit(fetch, chunk):
            return pb.SourceFrame(commit=pb.FetchCommit(fetch=fetch, chunk=chunk))
        case Offer(fetch, chunk, first, stop, counts, cached):
            offer = pb.FetchOffer(fetch=fetch, chunk=chunk, first=first, stop=stop, counts=counts, cached=cached)
            return pb.SourceFrame(offer=offer)


def to_target_message(frame: pb.SourceFrame) -> FromSource:
    """Raises InvalidTransferError."""
    match frame.WhichOneof("message"):
        case "granted":
            return Granted(frame.granted.fetch, frame.granted.blocks, frame.granted.block_seconds)
        case "refused":
            return Refused(frame.refused.fetch, frame.refused.reason)
        case "failed":
            return Failed(frame.failed.fetch, frame.failed.reason)
        case "commit":
            return Commit(frame.commit.fetch, frame.commit.chunk)
        case "offer":
            offer = frame.offer
            return Offer(offer.fetch, offer.chunk, offer.first, offer.stop, tuple(offer.counts), offer.cached)
        case _:
            raise InvalidTransferError("the frame is empty")
