"""Connects a rank to its replica's ranks: all connections are created once, in the same order on all ranks."""

import contextlib

from headrace_base.errors import HeadraceError
from headrace_kernels.cpu.library import missing
from headrace_worker.comm import shared_memory
from headrace_worker.comm.communicators import DeviceCommunicator, OrderedCommunicator
from headrace_worker.comm.failure_detection import FailureDetector
from headrace_worker.comm.group import device_group, host_group
from headrace_worker.comm.interface import rank_host, restrict_nccl
from headrace_worker.comm.parallel_context import Communicator, ParallelContext, SingleRank
from headrace_worker.comm.rendezvous import RendezvousHost, RendezvousStore, join_rendezvous
from headrace_worker.comm.topology import Topology
from headrace_worker.core.config import Rendezvous, ReplicaConfig
from headrace_worker.device.rank_device import RankDevice
from headrace_worker.ranks.team import Team


def join_team(
    config: ReplicaConfig,
    device: RankDevice,
    rank: int,
    rendezvous: Rendezvous,
    opened: RendezvousHost | None = None,
) -> Team:
    """Connects to the other ranks; `opened` on rank 0 only. Raises RendezvousError, RankLostError."""
    topology = Topology(config.tp, config.pp, rank)
    detector = FailureDetector(rank)
    detector.start()
    try:
        return detector.guard(lambda: _join(config, device, topology, rendezvous, opened, detector))
    except Exception as error:
        detector.fail(str(error) if isinstance(error, HeadraceError) else type(error).__name__)
        detector.close()
        raise


def _join(
    config: ReplicaConfig,
    device: RankDevice,
    topology: Topology,
    rendezvous: Rendezvous,
    opened: RendezvousHost | None,
    detector: FailureDetector,
) -> Team:
    rank, size = topology.rank, topology.size
    store = join_rendezvous(rendezvous, rank, size, detector, opened)
    address = rank_host(config)
    if device.uses_nccl:
        restrict_nccl(address)
    host = host_group(store, "host", address, rank, size, detector)
    pipe = host
    if device.uses_nccl and topology.pp > 1:
        pipe = device_group(store, "pipe", device.torch_device, rank, size, detector)
    notes: list[str] = []
    communicator = _communicator(config, topology, device, store, detector, notes)
    context = ParallelContext(communicator, topology.stage, topology.pp, config.ep)
    return Team(topology, detector, store, device, host, pipe, context, notes)


def _communicator(
    config: ReplicaConfig,
    topology: Topology,
    device: RankDevice,
    store: RendezvousStore,
    detector: FailureDetector,
    notes: list[str],
) -> Communicator:
    """Makes the communicator of the stage's ranks."""
    if topology.tp == 1:
        return SingleRank()
    if device.uses_nccl:
        name = f"stage-{topology.stage}"
        group = device_group(store, name, device.torch_device, topology.place, topology.tp, detector)
        # NCCL's order of addition depends on the size of the tensor.
        return OrderedCommunicator(group) if config.deterministic else DeviceCommunicator(group)
    segment = _shared_segment(topology, store, notes)
    if segment is not None:
        return shared_memory.SharedCommunicator(segment, topology.peers, topology.place, detector)
    group = host_group(store, f"stage-{topology.stage}", rank_host(config), topology.place, topology.tp, detector)
    return OrderedCommunicator(group)


def _shared_segment(topology: Topology, store: RendezvousStore, notes: list[str]) -> shared_memory.Segment | None:
    """The stage's shared memory, if all of its ranks can map it."""
    key = f"segment-{topology.stage}"
    segment, why = None, missing() or ""
    with contextlib.ExitStack() as stack:
        try:
            if topology.place == 0:
                ticket, segment = stack.enter_context(shared_memory.create_segment(topology.tp))
                store.set(key, ticket)
            else:
                segment = shared_memory.attach(store.read(key))
        except OSError as error:
            if topology.place == 0:
                store.set(key, "")
                why = why or f"there is no shared memory ({error.strerror})"
            why = why or "the ranks of a stage are not on one node, or may not open each other's memory"
        store.set(f"{key}-{topology.place}", why)
        reasons = [store.read(f"{key}-{place}") for place in range(topology.tp)]
    if not any(reasons):
        return segment
    why = next(reason for reason in reasons if reason)
    notes.append(f"Ranks of a stage communicate through gloo, which is slower than shared memory: {why}.")
    return None
