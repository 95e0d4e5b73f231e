"""A rank among its replica's ranks: everything that joins them, made once, in the same order by all."""

import contextlib
import hashlib
import socket
from pathlib import Path

import torch

from headrace_kernels.cpu.library import missing
from headrace_proto.errors import DeviceError, HeadraceError
from headrace_worker.config import Meeting, ReplicaConfig
from headrace_worker.model.device import choose_device
from headrace_worker.parallel import shared_memory
from headrace_worker.parallel.communicators import DeviceCommunicator, OrderedCommunicator
from headrace_worker.parallel.context import Alone, Communicator, ParallelContext
from headrace_worker.parallel.group import device_group, host_group
from headrace_worker.parallel.meeting import MeetingHost, meet
from headrace_worker.parallel.rounds import Rounds
from headrace_worker.parallel.topology import Topology
from headrace_worker.parallel.watch import Watch


class Team:
    """One rank's ends of all that joins the ranks of a replica.

    `host` carries commands and answers between all ranks (gloo). `pipe` carries hidden states between stages: the
    same group on CPUs, an NCCL group on GPUs. `context` says which part of the model this rank holds, and has the
    communicator of its stage.
    """

    def __init__(self, config: ReplicaConfig, rank: int, meeting: Meeting, opened: MeetingHost | None = None) -> None:
        """Meets the others. Rank 0 brings what it `opened`. Raises MeetingError, DeviceError, RankLostError."""
        self.topology = Topology(config.tp, config.pp, rank)
        self.notes: list[str] = []
        self.watch = Watch(rank)
        self._opened = opened  # the store lives in it
        self.watch.start()
        try:
            self.watch.guard(lambda: self._join(config, meeting))
        except Exception as error:
            self.watch.fail(str(error) if isinstance(error, HeadraceError) else type(error).__name__)
            self.watch.close()
            raise

    def _join(self, config: ReplicaConfig, meeting: Meeting) -> None:
        topology, watch = self.topology, self.watch
        self.board = meet(meeting, topology.rank, topology.size, watch, self._opened)
        self._rounds = self.rounds("agree")
        self.device = _bind(choose_device(config.device), topology.rank)
        self.host = host_group(self.board.store, "host", config.host, topology.rank, topology.size, watch)
        self.pipe = self.host
        if self.device.type == "cuda" and topology.pp > 1:
            self.pipe = device_group(self.board.store, "pipe", self.device, topology.rank, topology.size, watch)
        self.context = ParallelContext(self._communicator(config), topology.stage, topology.pp, config.ep)

    def agree(self, value: int) -> list[int]:
        """What each rank says, in rank order; all ranks ask the same questions in the same order.

        Waits for all, but not for the lost: raises RankLostError.
        """
        return [int(answer) for answer in self._rounds.say(str(value))]

    def rounds(self, name: str) -> Rounds:
        """A series of questions beside `agree`, for another thread; all ranks begin it once."""
        return Rounds(self.board, name, self.topology.rank, self.topology.size)

    def local_ranks(self) -> int:
        """How many ranks share this one's memory, itself included."""
        node = _node()
        return self.agree(node).count(node)

    def settle(self) -> None:
        """All are warm: what is compiled is compiled and collected, and who is silent now hangs."""
        self.agree(0)
        self.watch.be_strict()

    def close(self) -> None:
        """Leave in order."""
        self.watch.close()

    def _communicator(self, config: ReplicaConfig) -> Communicator:
        topology, store = self.topology, self.board.store
        if topology.tp == 1:
            return Alone()
        if self.device.type == "cuda":
            name = f"stage-{topology.stage}"
            group = device_group(store, name, self.device, topology.place, topology.tp, self.watch)
            # NCCL's order of adding depends on how much there is to add.
            return OrderedCommunicator(group) if config.deterministic else DeviceCommunicator(group)
        segment = self._share()
        if segment is not None:
            return shared_memory.SharedCommunicator(segment, topology.peers, topology.place, self.watch)
        group = host_group(store, f"stage-{topology.stage}", config.host, topology.place, topology.tp, self.watch)
        return OrderedCommunicator(group)

    def _share(self) -> shared_memory.Segment | None:
        """The stage's shared memory, if all of its ranks have it."""
        topology = self.topology
        key = f"segment-{topology.stage}"
        segment, why = None, missing() or ""
        with contextlib.ExitStack() as stack:
            try:
                if topology.place == 0:
                    ticket, segment = stack.enter_context(shared_memory.offered(topology.tp))
                    self.board.post(key, ticket)
                else:
                    segment = shared_memory.attach(self.board.read(key))
            except OSError as error:
                if topology.place == 0:
                    self.board.post(key, "")
                    why = why or f"there is no memory to share ({error.strerror})"
                why = why or "the ranks of a stage are not on one node, or may not open each other's memory"
            self.board.post(f"{key}-{topology.place}", why)
            reasons = [self.board.read(f"{key}-{place}") for place in range(topology.tp)]
        if not any(reasons):
            return segment
        why = next(reason for reason in reasons if reason)
        self.notes.append(f"Ranks of a stage talk through gloo, which takes longer than shared memory: {why}.")
        return None


def _bind(device: torch.device, rank: int) -> torch.device:
    """This rank's device, with its number: who started the rank gave it one GPU to see."""
    if device.type != "cuda":
        return device
    try:
        index = device.index or 0
        torch.cuda.set_device(index)
        torch.zeros(1, device="cuda")
    except RuntimeError as error:
        raise DeviceError(
            f"rank {rank} cannot use its GPU ({type(error).__name__}): see nvidia-smi for who holds it, and "
            "CUDA_VISIBLE_DEVICES for what this process may see"
        ) from error
    return torch.device("cuda", index)


def _node() -> int:
    """A number that processes of one machine share, and others do not."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        boot = ""
    digest = hashlib.sha256(f"{boot} {socket.gethostname()}".encode()).digest()
    return int.from_bytes(digest[:8], "big")
