"""Sums and gathers between processes of one machine, through memory that all of them map.

`src/exchange.cpp` documents the layout of a segment. This module does not depend on how the ranks connect.
"""

import ctypes
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace_kernels.arguments import KernelArgumentError
from headrace_kernels.cpu.library import load

LINE_BYTES = 64
_PAGE_BYTES = 4096
ABORTED = -1


def segment_bytes(size: int, slot_bytes: int) -> int:
    """Length of a segment for `size` ranks and chunks of `slot_bytes`, a multiple of 64."""
    head = -(-LINE_BYTES * (2 + size) // _PAGE_BYTES) * _PAGE_BYTES
    return head + 2 * size * slot_bytes


@dataclass(slots=True)
class Exchange:
    """One rank's end of a segment at `address`, which is zero except for its first line.

    All ranks make the same calls in the same order. A call returns 0 when it is done, `ABORTED` after `abort`, and
    1 + r when rank r did not join within `timeout_ms`; the exchange cannot be used after that.
    """

    address: int
    rank: int
    size: int
    slot_bytes: int
    timeout_ms: int
    _sequence: ctypes.c_uint32 = field(default_factory=lambda: ctypes.c_uint32(0))
    _status: ctypes.c_int64 = field(default_factory=lambda: ctypes.c_int64(0))

    def __post_init__(self) -> None:
        """Raises KernelArgumentError."""
        sizes = 0 <= self.rank < self.size and self.timeout_ms >= 0
        if not sizes or self.slot_bytes <= 0 or self.slot_bytes % LINE_BYTES:
            raise KernelArgumentError(
                f"Rank {self.rank} of {self.size} cannot exchange tensors through slots of {self.slot_bytes} bytes: "
                f"the bytes must be a multiple of {LINE_BYTES}."
            )

    def sum(self, tensor: Tensor) -> int:
        """Sum a contiguous float32 CPU tensor over two ranks or more, in place, in rank order on every rank."""
        if self.size < 2 or not can_sum(tensor) or not tensor.is_contiguous():
            raise KernelArgumentError(
                f"A tensor of {tensor.dtype} with strides {tensor.stride()} cannot be summed over {self.size} ranks."
            )
        load().headrace_exchange_sum(
            self.address, tensor.data_ptr(), tensor.numel(), self.rank, self.size, self.slot_bytes,
            ctypes.addressof(self._sequence), self.timeout_ms, ctypes.addressof(self._status),
        )  # fmt: skip
        return self._status.value

    def gather(self, tensor: Tensor, out: Tensor) -> int:
        """out [size, *tensor.shape] = the tensor of each rank; both contiguous, of any dtype, on the CPU."""
        whole = tensor.is_contiguous() and out.is_contiguous() and tensor.is_cpu and out.is_cpu
        if not whole or out.nbytes != self.size * tensor.nbytes:
            raise KernelArgumentError(
                f"A tensor {list(tensor.shape)} of {self.size} ranks cannot be gathered into {list(out.shape)}: both "
                "have to be contiguous, on the CPU, and of one dtype."
            )
        load().headrace_exchange_gather(
            self.address, tensor.data_ptr(), out.data_ptr(), tensor.numel() * tensor.element_size(), self.rank,
            self.size, self.slot_bytes, ctypes.addressof(self._sequence), self.timeout_ms,
            ctypes.addressof(self._status),
        )  # fmt: skip
        return self._status.value

    def abort(self) -> None:
        """End all waits, in all processes; from any thread."""
        ctypes.c_uint32.from_address(self.address + LINE_BYTES).value = 1


def can_sum(tensor: Tensor) -> bool:
    """Whether `Exchange.sum` supports it."""
    return tensor.dtype is torch.float32 and tensor.is_cpu
