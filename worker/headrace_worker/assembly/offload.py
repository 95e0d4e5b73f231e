"""A rank's host memory and file for KV blocks that the cache evicts."""

from collections.abc import Callable, Mapping

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


def host_memory(caches: Mapping[int, LayerCache], slots: int, device: RankDevice) -> dict[int, Tensor]:
    """By layer [2, slots + 1, K, P, D] in host memory: layers that share a pool share it, too. Slot 0 is not used.

    Raises MemoryTooSmallError.
    """
    made: dict[int, Tensor] = {}
    try:
        for cache in caches.values():
            if cache.pool.data_ptr() not in made:
                shape = (2, slots + 1, *cache.pool.shape[2:])
                made[cache.pool.data_ptr()] = device.host_memory(shape, cache.pool.dtype)
    except RuntimeError as error:
        raise MemoryTooSmallError(
            "--kv-offload-memory cannot be allocated in host memory: give a smaller one."
        ) from error
    return {layer: made[cache.pool.data_ptr()] for layer, cache in caches.items()}


def slot_parts(
    memory: Mapping[int, Tensor], layers: tuple[tuple[int, ...], ...]
) -> Callable[[int, int], list[memoryview]]:
    """The bytes of a slot of a cache group: keys and values of each layer. memory: by layer. layers: by cache group."""
    views = {layer: tensor.view(torch.uint8).flatten(2).numpy() for layer, tensor in memory.items()}
    by_group = [[part for layer in group for part in views[layer]] for group in layers]
    return lambda group, slot: [memoryview(part[slot]) for part in by_group[group]]


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
