"""A rank's transfer worker: its start, with the memory of all ranks of the replica, and its reports to rank 0."""

import base64
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from uuid import uuid4

import msgspec
from torch import Tensor

from headrace_proto.role import Role
from headrace_worker.assembly.command_queue import CommandQueue
from headrace_worker.assembly.offload import HostSlots, host_memory, open_file, slot_parts
from headrace_worker.comm.failure_detection import FailureDetector
from headrace_worker.comm.interface import interface_of, rank_host
from headrace_worker.core.config import ReplicaConfig
from headrace_worker.core.layout import StatePart
from headrace_worker.core.transfer.orders import TransferReport
from headrace_worker.core.transfer.shards import RankShard
from headrace_worker.core.transfer.slots import Slots
from headrace_worker.kv_transfer.agent import KvAgent, TransfersUnavailableError
from headrace_worker.kv_transfer.offload_file import OffloadFile
from headrace_worker.kv_transfer.transfer_worker import HostMemory, TransferWorker
from headrace_worker.model.attention import LayerCache
from headrace_worker.model.kv_shards import kv_shards, state_memory, state_tensors
from headrace_worker.model.load import LoadedModel
from headrace_worker.ranks.team import Team
from headrace_worker.runner.pools import KVPools, bind_layers

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(TransferReport).decode


@dataclass(frozen=True, slots=True)
class Transfers:
    """The transfer worker of one rank, and what its file holds."""

    worker: TransferWorker | None  # None where NIXL cannot be used
    note: str  # a sentence for the start
    files: Slots  # places of its file, and what they have


def open_transfers(
    config: ReplicaConfig,
    model: LoadedModel,
    pools: KVPools,
    host_slots: HostSlots,
    team: Team | None,
    report: Callable[[TransferReport], None],
) -> Transfers:
    """All ranks call this.

    pools: of this rank. host_slots: of host memory for what is evicted. Raises TransfersUnavailableError for a
    replica of a pool or with host slots, UnknownBackendError, MemoryTooSmallError, OffloadFolderError.
    """
    rank = team.topology.rank if team is not None else 0
    size, parts = model.dtype.itemsize, model.layout.state_parts
    shards = kv_shards(
        model.config, model.kv_dtype_name, config.block_size, size, config.tp, config.pp, parts, model.layout.kv_format
    )
    agent: KvAgent | None = None
    reason = ""
    host: dict[int, LayerCache] = {}
    host_states: dict[tuple[int, str], Tensor] = {}
    try:
        memory_of_pools = [*pools.tensors, *pools.states.values()]
        made = KvAgent(f"{config.replica_id}-{rank}-{uuid4().hex}", memory_of_pools, transport_of(config))
        if host_slots.blocks:
            host_pools, host_states = host_memory(pools, host_slots, model.device)
            host = bind_layers(model.layout, host_pools)
            made.register([*host_pools, *host_states.values()])
        agent = made
    except TransfersUnavailableError as error:
        reason = str(error)
    mine = _with_memory(shards.ranks[rank], agent, pools.layers, parts, pools.states)
    ranks = [mine]
    if team is not None:
        texts = team.new_all_gather("memory").gather(base64.b64encode(msgspec.msgpack.encode(mine)).decode())
        ranks = [msgspec.msgpack.decode(base64.b64decode(text), type=RankShard) for text in texts]
    unplaced, shards = shards, msgspec.structs.replace(shards, ranks=tuple(ranks))
    if agent is None or not all(each.agent for each in ranks):
        reason = reason or "Another rank of this replica has no NIXL."
        if config.role is not Role.BOTH or host_slots.blocks:
            raise TransfersUnavailableError(reason)
        return Transfers(None, reason, Slots(0))
    check = team.detector.check if team is not None else lambda: None
    memory, file = None, None
    if host_slots.blocks:
        groups = range(len(model.layout.groups))
        slots_of = slot_parts(host, tuple(mine.groups[group].layers for group in groups))
        block_bytes = max(sum(map(len, slots_of(group, 0))) for group in groups)
        file = open_file(config, model.source.revision, unplaced, block_bytes, team)
        memory = HostMemory(_with_memory(mine, agent, host, parts, host_states), slots_of, file)
    worker = TransferWorker(rank, shards, agent, model.device, report, check, memory)
    note = f"KV blocks move by NIXL ({transport_of(config)})."
    return Transfers(worker, note, _places(file, rank))


def _places(file: OffloadFile | None, rank: int) -> Slots:
    """With what rank 0's file has: each rank compares its own records when it reads."""
    if file is None:
        return Slots(0)
    return Slots(file.places, file.contents() if rank == 0 else ())


def transport_of(config: ReplicaConfig) -> str:
    """With the devices that UCX may use: the interface of rank traffic, since its ports have no password, and RDMA.

    Raises RendezvousError.
    """
    if ":" in config.kv_transfer or os.environ.get("UCX_NET_DEVICES"):
        return config.kv_transfer
    interface = interface_of(rank_host(config))
    ports = [] if interface == "lo" else sorted(Path("/sys/class/infiniband").glob("*/ports/*"))
    devices = [interface, *(f"{port.parts[-3]}:{port.name}" for port in ports)]
    return f"{config.kv_transfer}:{','.join(devices)}"


def _with_memory(
    shard: RankShard,
    agent: KvAgent | None,
    caches: Mapping[int, LayerCache],
    parts: tuple[StatePart, ...] = (),
    states: Mapping[tuple[int, str], Tensor] = MappingProxyType({}),
) -> RankShard:
    """caches: by layer. parts: of the layers with states."""
    if agent is None:
        return shard
    blocks = len(shard.groups) - len(state_tensors(parts))
    tensors = [[caches[layer].memory for layer in group.layers] for group in shard.groups[:blocks]]
    addresses = tuple(tuple(tuple(part.data_ptr() for part in layer) for layer in group) for group in tensors)
    strides = tuple(tuple(part.stride(0) * part.itemsize for part in group[0]) if group else () for group in tensors)
    of_states = state_memory(parts, shard.groups[blocks:], states)
    addresses, strides = addresses + of_states[0], strides + of_states[1]
    held = [part for cache in caches.values() for part in cache.parts] + list(states.values())
    on_gpu = [tensor.device.index for tensor in held if tensor.device.type != "cpu"]
    index = on_gpu[0] if on_gpu else -1  # a stage may keep nothing
    return msgspec.structs.replace(shard, agent=agent.metadata, addresses=addresses, strides=strides, device=index)


def to_commands(commands: CommandQueue) -> Callable[[TransferReport], None]:
    """For rank 0's transfer worker."""
    return lambda report: commands.exchange(lambda exchange: exchange.handle_report(report))


def to_rank_0(detector: FailureDetector) -> Callable[[TransferReport], None]:
    """For any other rank's transfer worker."""
    return lambda report: detector.notify_rank_0(_encode(report))


def forward_notes(detector: FailureDetector, commands: CommandQueue) -> None:
    """Passes the reports of the other ranks to the step loop of rank 0."""
    handle = to_commands(commands)
    detector.on_notice(lambda note: handle(_decode(note)))
