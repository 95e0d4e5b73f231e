"""A rank's host memory and file for KV blocks and recurrent states that the cache evicts."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec
import torch
from blake3 import blake3
from torch import Tensor

from headrace_base.errors import MemoryTooSmallError, size_text
from headrace_worker.core.config import ReplicaConfig
from headrace_worker.core.layout import CacheLayout
from headrace_worker.core.transfer.shards import KvShards
from headrace_worker.device.rank_device import RankDevice
from headrace_worker.kv_transfer.offload_file import OffloadFile
from headrace_worker.model.attention import LayerCache
from headrace_worker.ranks.team import Team
from headrace_worker.runner.pools import KVPools

SIZES = 4  # times the host memory's size: the size of the file where none is given


class HostSlots(NamedTuple):
    """What fits into a rank's host memory: the same numbers on all ranks."""

    blocks: int = 0
    states: int = 0

    @staticmethod
    def tokens(blocks: int, layout: CacheLayout) -> int:
        """That so many blocks hold."""
        return blocks // len(layout.groups) * layout.block_size

    def note(self, layout: CacheLayout) -> str:
        """A sentence for the start."""
        sizes = size_text(self.blocks * layout.block_bytes), size_text(self.states * layout.state_bytes)
        text = f"Evicted KV blocks: {sizes[0]} of host memory for {self.tokens(self.blocks, layout):,} tokens"
        beside = f", and {sizes[1]} for {self.states:,} snapshots of recurrent state" if self.states else ""
        return f"{text}{beside}."


def host_slots(budget: int, layout: CacheLayout, team: Team | None) -> HostSlots:
    """Divides the bytes of --kv-offload-memory: half is for snapshots on a rank that keeps recurrent state.

    All ranks call this. A rank without attention sets no limit to the number of blocks, and one without recurrent
    layers none to the number of states. Raises MemoryTooSmallError where not one block or state fits.
    """
    states = budget // 2 // layout.state_bytes if layout.state_bytes else 0
    if layout.state_bytes and not states:
        raise MemoryTooSmallError(
            f"Half of --kv-offload-memory is for recurrent states, and one has {size_text(layout.state_bytes)}: give "
            f"at least {size_text(2 * layout.state_bytes)}."
        )
    of_blocks = budget // 2 if layout.state_bytes else budget
    if of_blocks < layout.block_bytes:
        raise MemoryTooSmallError(
            f"--kv-offload-memory has {size_text(of_blocks)} for KV blocks, and one has "
            f"{size_text(layout.block_bytes)}: give a larger one."
        )
    blocks = of_blocks // max(1, layout.block_bytes)
    if team is not None:
        blocks = min(team.gather_all(blocks))
        states = min([number for number in team.gather_all(states) if number], default=0)
    return HostSlots(blocks, states)


def host_memory(
    pools: KVPools, slots: HostSlots, device: RankDevice
) -> tuple[list[Tensor], dict[tuple[int, str], Tensor]]:
    """Pools [parts, blocks, N] and states [slots, ...] like those of the device, in host memory; slot 0 is not used.

    Raises MemoryTooSmallError.
    """
    try:
        blocks = [
            device.host_memory((len(pool), slots.blocks + 1, pool.shape[2]), pool.dtype) for pool in pools.tensors
        ]
        states = {
            key: device.host_memory((slots.states + 1, *state.shape[1:]), state.dtype)
            for key, state in pools.states.items()
        }
        return blocks, states
    except RuntimeError as error:
        raise MemoryTooSmallError(
            "--kv-offload-memory cannot be allocated in host memory: give a smaller one."
        ) from error


def slot_parts(
    memory: Mapping[int, LayerCache], layers: tuple[tuple[int, ...], ...]
) -> Callable[[int, int], list[memoryview]]:
    """The bytes of a slot of a cache group: keys and values of each layer. memory: by layer. layers: by cache group."""
    by_group = [[part.view(torch.uint8) for layer in group for part in memory[layer].memory] for group in layers]
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
    first = team.gather_all(file.number if file is not None else 0)[0]  # number of rank 0's file
    return file or open_at(first)  # a file with another number lacks rank 0's blocks: they count as absent
