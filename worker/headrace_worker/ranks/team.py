"""The connections of a rank to its replica's ranks: all created once, in the same order on all ranks."""

import contextlib
import hashlib
import socket
from pathlib import Path

import torch

from headrace_kernels.cpu.library import missing
from headrace_proto.errors import DeviceError, HeadraceError
from headrace_worker.comm import shared_memory
from headrace_worker.comm.communicators import DeviceCommunicator, OrderedCommunicator
from headrace_worker.comm.failure_detection import FailureDetector
from headrace_worker.comm.group import device_group, host_group
from headrace_worker.comm.parallel_context import Communicator, ParallelContext, SingleRank
from headrace_worker.comm.rendezvous import RendezvousHost, join_rendezvous
from headrace_worker.comm.store_all_gather import StoreAllGather
from headrace_worker.comm.topology import Topology
from headrace_worker.core.config import Rendezvous, ReplicaConfig
from headrace_worker.device.choice import choose_device


class Team:
    """One rank's ends of all connections between the ranks of a replica.

    `host` transfers commands and answers between all ranks (gloo). `pipe` transfers hidden states between stages: the
    same group on CPUs, an NCCL group on GPUs. `context` is the part of the model this rank holds, with the
    communicator of its stage.
    """

    def __init__(
        self, config: ReplicaConfig, rank: int, rendezvous: Rendezvous, opened: RendezvousHost | None = None
    ) -> None:
        """Connects to the others; `opened` on rank 0 only. Raises RendezvousError, DeviceError, RankLostError."""
        self.topology = Topology(config.tp, config.pp, rank)
        self.notes: list[str] = []
        self.detector = FailureDetector(rank)
        self._opened = opened  # the store lives in it
        self.detector.start()
        try:
            self.detector.guard(lambda: self._join(config, rendezvous))
        except Exception as error:
            self.detector.fail(str(error) if isinstance(error, HeadraceError) else type(error).__name__)
            self.detector.close()
            raise

    def _join(self, config: ReplicaConfig, rendezvous: Rendezvous) -> None:
        topology, detector = self.topology, self.detector
        self.rendezvous_store = join_rendezvous(rendezvous, topology.rank, topology.size, detector, self._opened)
        self._all_gather = self.new_all_gather("agree")
        self.device = _bind_device(choose_device(config.device), topology.rank)
        self.host = host_group(self.rendezvous_store.store, "host", config.host, topology.rank, topology.size, detector)
        self.pipe = self.host
        if self.device.type == "cuda" and topology.pp > 1:
            self.pipe = device_group(
                self.rendezvous_store.store, "pipe", self.device, topology.rank, topology.size, detector
            )
        self.context = ParallelContext(self._communicator(config), topology.stage, topology.pp, config.ep)

    def gather_all(self, value: int) -> list[int]:
        """The value of each rank, in rank order; all ranks call this equally often.

        Waits for all ranks; raises RankLostError when one is lost.
        """
        return [int(text) for text in self._all_gather.gather(str(value))]

    def new_all_gather(self, name: str) -> StoreAllGather:
        """A sequence of all-gathers beside `gather_all`, for another thread; all ranks create it once."""
        return StoreAllGather(self.rendezvous_store, name, self.topology.rank, self.topology.size)

    def local_ranks(self) -> int:
        """How many ranks share this one's memory, itself included."""
        node = _node_number()
        return self.gather_all(node).count(node)

    def barrier(self) -> None:
        """Wait until all ranks are warm: nothing is compiled after this, and a silent rank counts as hanging."""
        self.gather_all(0)
        self.detector.enable_hang_detection()

    def close(self) -> None:
        """Leave in an orderly way."""
        self.detector.close()

    def _communicator(self, config: ReplicaConfig) -> Communicator:
        topology, store = self.topology, self.rendezvous_store.store
        if topology.tp == 1:
            return SingleRank()
        if self.device.type == "cuda":
            name = f"stage-{topology.stage}"
            group = device_group(store, name, self.device, topology.place, topology.tp, self.detector)
            # NCCL's order of addition depends on the size of the tensor.
            return OrderedCommunicator(group) if config.deterministic else DeviceCommunicator(group)
        segment = self._shared_segment()
        if segment is not None:
            return shared_memory.SharedCommunicator(segment, topology.peers, topology.place, self.detector)
        group = host_group(store, f"stage-{topology.stage}", config.host, topology.place, topology.tp, self.detector)
        return OrderedCommunicator(group)

    def _shared_segment(self) -> shared_memory.Segment | None:
        """The stage's shared memory, if all of its ranks can map it."""
        topology = self.topology
        key = f"segment-{topology.stage}"
        segment, why = None, missing() or ""
        with contextlib.ExitStack() as stack:
            try:
                if topology.place == 0:
                    ticket, segment = stack.enter_context(shared_memory.create_segment(topology.tp))
                    self.rendezvous_store.post(key, ticket)
                else:
                    segment = shared_memory.attach(self.rendezvous_store.read(key))
            except OSError as error:
                if topology.place == 0:
                    self.rendezvous_store.post(key, "")
                    why = why or f"there is no shared memory ({error.strerror})"
                why = why or "the ranks of a stage are not on one node, or may not open each other's memory"
            self.rendezvous_store.post(f"{key}-{topology.place}", why)
            reasons = [self.rendezvous_store.read(f"{key}-{place}") for place in range(topology.tp)]
        if not any(reasons):
            return segment
        why = next(reason for reason in reasons if reason)
        self.notes.append(f"Ranks of a stage communicate through gloo, which is slower than shared memory: {why}.")
        return None


def _bind_device(device: torch.device, rank: int) -> torch.device:
    """This rank's device, with its index: the launcher made one GPU visible to the rank."""
    if device.type != "cuda":
        return device
    try:
        index = device.index or 0
        torch.cuda.set_device(index)
        torch.zeros(1, device="cuda")
    except RuntimeError as error:
        raise DeviceError(
            f"rank {rank} cannot use its GPU ({type(error).__name__}): see which processes use it with nvidia-smi, and "
            "CUDA_VISIBLE_DEVICES for what this process may see"
        ) from error
    return torch.device("cuda", index)


def _node_number() -> int:
    """A number that is the same for all processes of one machine, and differs between machines."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        boot = ""
    digest = hashlib.sha256(f"{boot} {socket.gethostname()}".encode()).digest()
    return int.from_bytes(digest[:8], "big")
