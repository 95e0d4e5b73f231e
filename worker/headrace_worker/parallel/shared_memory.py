"""Tensor parallelism within a node without NCCL: ranks meet in one piece of shared memory.

The memory has no name, and so nothing is left of it however the ranks end: the first rank of a stage tells the others
which of its open files it is, and they open it there, which is for processes of the same user and node alone.
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
from headrace_worker.parallel.communicators import add_in_order, join
from headrace_worker.parallel.watch import Watch

SLOT_BYTES = 128 << 10  # two sets of slots of two ranks fit into a second-level cache
TIMEOUT_SECONDS = 600.0  # for a rank that lives but does not come: only a bug does this


class Segment:
    """Memory that several processes map."""

    def __init__(self, descriptor: int) -> None:
        self._mapping = mmap.mmap(descriptor, 0)
        self._anchor = ctypes.c_char.from_buffer(self._mapping)  # keeps the mapping at its address
        self.address = ctypes.addressof(self._anchor)

    @property
    def key(self) -> bytes:
        """The first line, by which a process knows that it opened the right file."""
        return self._mapping[:LINE_BYTES]


@contextlib.contextmanager
def offered(size: int, slot_bytes: int = SLOT_BYTES) -> Iterator[tuple[str, Segment]]:
    """A segment for `size` ranks, and the ticket with which the others attach until the context ends.

    Raises OSError when there is no shared memory.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError(0, "this system has none")
    descriptor = os.memfd_create("headrace")
    try:
        # Reserved now: a page that cannot be had later would be a SIGBUS.
        os.posix_fallocate(descriptor, 0, segment_bytes(size, slot_bytes))
        key = secrets.token_bytes(LINE_BYTES)
        os.pwrite(descriptor, key, 0)
        yield f"{_home()} {os.getpid()} {descriptor} {key.hex()}", Segment(descriptor)
    finally:
        os.close(descriptor)


def attach(ticket: str) -> Segment:
    """The segment of a ticket. Raises OSError when it is not on this node, or not the one meant, or there is none."""
    match ticket.split():
        case [home, process, number, key] if home == _home():
            descriptor = os.open(f"/proc/{int(process)}/fd/{int(number)}", os.O_RDWR | os.O_CLOEXEC)
        case _:  # a process id of another node or container would be somebody else's here
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


def _home() -> str:
    """Within what process ids mean the same: a container of a running kernel. Raises OSError where that is hidden."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"


class SharedCommunicator:
    """Sums and gathers of CPU tensors through a segment. Ends with RankLostError as soon as the watch loses a rank."""

    def __init__(
        self, segment: Segment, peers: Sequence[int], place: int, watch: Watch, timeout: float = TIMEOUT_SECONDS
    ) -> None:
        """`peers`: the ranks that share the segment; `place`: which of them this one is."""
        self.rank = place
        self.size = len(peers)
        self._peers = peers
        self._timeout = timeout
        self._segment = segment
        self._watch = watch
        self._exchange = Exchange(segment.address, self.rank, self.size, SLOT_BYTES, int(timeout * 1000))
        watch.call(lambda failure: self._exchange.abort())

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
        if status == ABORTED:  # by this rank's watch, or by another's that knew earlier
            raise self._watch.explain(ConnectionAbortedError())
        lost = self._peers[status - 1]
        self._watch.fail(f"rank {lost} did not come to a sum in {self._timeout:.0f} s")
        self._watch.check()
