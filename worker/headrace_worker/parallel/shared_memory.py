"""Tensor parallelism within a node without NCCL: ranks meet in one piece of shared memory.

The memory is a file in /dev/shm, readable by this user alone, under a random name that only the ranks know, and
unlinked as soon as all have opened it: nothing is left, however the ranks end.
"""

import contextlib
import ctypes
import mmap
import os
import secrets
from pathlib import Path

import torch
from torch import Tensor

from headrace_kernels.cpu.exchange import ABORTED, LINE_BYTES, Exchange, can_sum, segment_bytes
from headrace_worker.parallel.communicators import add_in_order, join
from headrace_worker.parallel.errors import RankLostError
from headrace_worker.parallel.watch import Watch

FOLDER = Path("/dev/shm")
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


def create(size: int, slot_bytes: int = SLOT_BYTES) -> tuple[Segment, str, bytes]:
    """A segment for `size` ranks, its name and its key. The caller unlinks it. Raises OSError: no shared memory."""
    name = f"headrace-{secrets.token_hex(16)}"
    descriptor = os.open(FOLDER / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Reserved now: a page that cannot be had later would be a SIGBUS.
        os.posix_fallocate(descriptor, 0, segment_bytes(size, slot_bytes))
        key = secrets.token_bytes(LINE_BYTES)
        os.write(descriptor, key)
        return Segment(descriptor), name, key
    except OSError:
        unlink(name)
        raise
    finally:
        os.close(descriptor)


def attach(name: str, key: bytes) -> Segment:
    """The segment of that name. Raises OSError when it is not on this node, or not the one meant."""
    descriptor = os.open(FOLDER / Path(name).name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        segment = Segment(descriptor)
    finally:
        os.close(descriptor)
    if segment.key != key:
        raise FileNotFoundError(name)
    return segment


def unlink(name: str) -> None:
    """Take the name away; who mapped the memory keeps it."""
    with contextlib.suppress(FileNotFoundError):
        (FOLDER / name).unlink()


class SharedCommunicator:
    """Sums and gathers of CPU tensors through a segment. Ends with RankLostError as soon as the watch loses a rank."""

    def __init__(self, segment: Segment, rank: int, size: int, watch: Watch, timeout: float = TIMEOUT_SECONDS) -> None:
        self.rank = rank
        self.size = size
        self._segment = segment
        self._watch = watch
        self._exchange = Exchange(segment.address, rank, size, SLOT_BYTES, int(timeout * 1000))
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
        if status == ABORTED:
            self._watch.check()
            raise RankLostError("the ranks were told to end")
        raise RankLostError(f"rank {status - 1} of the stage did not come to a sum in {TIMEOUT_SECONDS:.0f} s")
