"""A rank's host memory and file for KV blocks that the cache evicts."""

from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch
from blake3 import blake3
from torch import Tensor

from headrace_proto.errors import MemoryTooSmallError
from headrace_worker.core.config import ReplicaConfig
from headrace_worker.core.transfer.shards import KvShards
from headrace_worker.device.rank_device import RankDevice
from headrace_worker.kv_transfer.offload_file import OffloadFile
from headrace_worker.model.attention import LayerCache
from headrace_worker.ranks.team import Team

SIZES = 4  # of the file, beside that of the host memory, where none is given


def host_memory(pools: Sequence[Tensor], slots: int, device: RankDevice) -> list[Tensor]:
    """As the pools [parts, blocks, N], for `slots` blocks in host memory, and slot 0, which is not used.

    Raises MemoryTooSmallError.
    """
    try:
        return [device.host_memory((len(pool), slots + 1, pool.shape[2]), pool.dtype) for pool in pools]
    except RuntimeError as error:
        raise MemoryTooSmallError(
            "--kv-offload-memory cannot be allocated in host memory: give a smaller one."
        ) from error


def slot_parts(
    memory: Mapping[int, LayerCache], layers: tuple[tuple[int, ...], ...]
) -> Callable[[int, int], list[memoryview]]:
    """The bytes of a slot of a cache group: keys and values of each layer. memory: by layer. layers: by cache group."""
    by_group = [
        [part.flatten(1).view(torch.uint8) for layer in group for part in memory[layer].parts] for group in layers
    ]
    arrays = [[part.numpy() for part in parts] for parts in by_group]
    return lambda group, slot: [memoryview(part[slot]) for part in arrays[group]]


def open_file(
    config: ReplicaConfig, revision: str, shards: KvShards, block_bytes: int, team: Team | None
) -> OffloadFile | None:
    """This rank's, of the same number and size on all ranks; None without --kv-offload-dir. All ranks call this.

    block_bytes: of this rank. Raises OffloadFolderError.
    """
    folder = config.kv_offload_dir
    if folder is None or not config.kv_offload_memory:
        return None
    rank = team.topology.rank if team is not None else 0
    of_model = msgspec.msgpack.encode((config.model, revision, rank, shards))
    name = blake3(of_model).hexdigest(8)
    places = (config.kv_offload_dir_size or SIZES * config.kv_offload_memory) // block_bytes

    def open_at(first: int) -> OffloadFile:
        return OffloadFile.open(folder, name, first, places, block_bytes, config.block_size)

    if team is None:
        return open_at(0)
    places = min(team.gather_all(places))
    file = open_at(0) if rank == 0 else None
    first = team.gather_all(file.number if file is not None else 0)[0]  # of rank 0's file
    return file or open_at(first)  # a file with another number lacks rank 0's blocks: they count as absent
