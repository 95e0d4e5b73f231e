"""Tensor parallelism within a node without NCCL: ranks exchange tensors through one segment of shared memory.

The memory has no name, and so nothing is left of it however the ranks end: the first rank of a stage sends the others
its process id and file descriptor, and they open it through /proc, which only the same user on the same node can do.
"""

import contextlib
import ctypes
import mmap
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from headrace_kernels.cpu.exchange import ABORTED, LINE_BYTES, Exchange, can_sum, segment_bytes
from headrace_worker.comm.communicators import add_in_order, join
from headrace_worker.comm.failure_detection import FailureDetector

SLOT_BYTES = 128 << 10  # two sets of slots of two ranks fit into a second-level cache
TIMEOUT_SECONDS = 600.0  # for a live rank that does not call the collective: only a bug causes this


class Segment:
    """Memory that several processes map."""

    def __init__(self, descriptor: int) -> None:
        self._mapping = mmap.mmap(descriptor, 0)
        self._pinned = ctypes.c_char.from_buffer(self._mapping)  # keeps the mapping at its address
        self.address = ctypes.addressof(self._pinned)

    @property
    def key(self) -> bytes:
        """The first line, by which a process verifies that it opened the right file."""
        return self._mapping[:LINE_BYTES]


@contextlib.contextmanager
def create_segment(size: int, state_bytes: int = SLOT_BYTES) -> Iterator[tuple[str, Segment]]:
    """A segment for `size` ranks, and the ticket with which the others attach until the context ends.

    Raises OSError when there is no shared memory.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError(0, "this system has no memfd_create")
    descriptor = os.memfd_create("headrace")
    try:
        # Reserved now: a page that cannot be allocated later would be a SIGBUS.
        os.posix_fallocate(descriptor, 0, segment_bytes(size, state_bytes))
        key = secrets.token_bytes(LINE_BYTES)
        os.pwrite(descriptor, key, 0)
        yield f"{_pid_scope()} {os.getpid()} {descriptor} {key.hex()}", Segment(descriptor)
    finally:
        os.close(descriptor)


def attach(ticket: str) -> Segment:
    """The segment of a ticket. Raises OSError when it is on another node, is the wrong one, or does not exist."""
    match ticket.split():
        case [scope, process, number, key] if scope == _pid_scope():
            descriptor = os.open(f"/proc/{int(process)}/fd/{int(number)}", os.O_RDWR | os.O_CLOEXEC)
        case _:  # a process id of another node or container is another process here
            raise FileNotFoundError(ticket)
    try:
        segment = Segment(descriptor)
    except ValueError as error:  # an empty file
        raise FileNotFoundError(ticket) from error
    finally:
        os.close(descriptor)
    if segment.key != bytes.fromhex(key):
        raise FileNotFoundError(ticket)
    return segment


def _pid_scope() -> str:
    """The scope of process ids: PID namespace and boot of the kernel. Raises OSError where these are hidden."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"


class SharedCommunicator:
    """Sums and gathers CPU tensors through a segment. Raises RankLostError as soon as the detector reports a loss."""

    def __init__(
        self,
        segment: Segment,
        peers: Sequence[int],
        place: int,
        detector: FailureDetector,
        timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        """`peers`: the ranks that share the segment; `place`: this rank's index among them."""
        self.rank = place
        self.size = len(peers)
        self._peers = peers
        self._timeout = timeout
        self._segment = segment
        self._detector = detector
        self._exchange = Exchange(segment.address, self.rank, self.size, SLOT_BYTES, int(timeout * 1000))
        detector.on_loss(lambda failure: self._exchange.abort())

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if not can_sum(tensor):
            return add_in_order(self._gather(tensor), tensor)
        if tensor.is_contiguous():
            self._check(self._exchange.sum(tensor))
            return tensor
        whole = tensor.contiguous()
        self._check(self._exchange.sum(whole))
        return tensor.copy_(whole)

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        return join(self._gather(tensor), dim)

    def _gather(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        out = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype)
        self._check(self._exchange.gather(tensor, out))
        return out

    def _check(self, status: int) -> None:
        if status == 0:
            return
        if status == ABORTED:  # by this rank's detector, or by another's that detected the loss earlier
            raise self._detector.explain(ConnectionAbortedError())
        lost = self._peers[status - 1]
        self._detector.fail(f"rank {lost} did not join a sum in {self._timeout:.0f} s")
        self._detector.check()
