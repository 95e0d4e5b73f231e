"""The connections of a rank to its replica's ranks."""

import contextlib
import hashlib
import json
import socket
from collections.abc import Mapping
from pathlib import Path

from headrace_worker.comm.errors import RankLostError
from headrace_worker.comm.failure_detection import FailureDetector
from headrace_worker.comm.group import Group
from headrace_worker.comm.parallel_context import ParallelContext
from headrace_worker.comm.rendezvous import RendezvousStore, StoreAllGather
from headrace_worker.comm.topology import Topology
from headrace_worker.device.rank_device import RankDevice
from headrace_worker.ranks.loaded_facts import RanksDifferError, describe_difference


class Team:
    """One rank's ends of all connections between the ranks of a replica. `join.join_team` creates it.

    `host` transfers commands and answers between all ranks (gloo). `pipe` transfers hidden states between stages: the
    same group on CPUs, an NCCL group on GPUs. `context` is the part of the model this rank holds, with the
    communicator of its stage.
    """

    def __init__(
        self,
        topology: Topology,
        detector: FailureDetector,
        store: RendezvousStore,
        device: RankDevice,
        host: Group,
        pipe: Group,
        context: ParallelContext,
        notes: list[str],
    ) -> None:
        """notes: sentences for the start, about how the ranks are connected."""
        self.topology = topology
        self.detector = detector
        self.store = store
        self.device = device
        self.host = host
        self.pipe = pipe
        self.context = context
        self.notes = notes
        self._all_gather = self.new_all_gather("agree")

    def gather_all(self, value: int) -> list[int]:
        """The value of each rank, in rank order; all ranks call this equally often.

        Waits for all ranks; raises RankLostError when one is lost.
        """
        return [int(text) for text in self._all_gather.gather(str(value))]

    def new_all_gather(self, name: str) -> StoreAllGather:
        """A sequence of all-gathers beside `gather_all`, for another thread; all ranks create it once."""
        return StoreAllGather(self.store, name, self.topology.rank, self.topology.size)

    def check_equal(self, facts: Mapping[str, str]) -> None:
        """Raises RanksDifferError on every rank, unless all have the same facts; RankLostError when one is lost."""
        gather = self.new_all_gather("facts")
        found = [json.loads(text) for text in gather.gather(json.dumps(dict(facts)))]
        if difference := describe_difference(found):
            with contextlib.suppress(RankLostError):  # loss of the first rank that ends, once all have read the facts
                gather.gather("")
            raise RanksDifferError(difference)

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


def _node_number() -> int:
    """A number that is the same for all processes of one machine, and differs between machines."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        boot = ""
    digest = hashlib.sha256(f"{boot} {socket.gethostname()}".encode()).digest()
    return int.from_bytes(digest[:8], "big")
