"""Copies between host and device, without waiting."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16  # bytes: required by the widest loads of a kernel


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """The array as a tensor on `device`: on a CPU without a copy, on CUDA through pinned memory, without waiting."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def all_to_device(arrays: Sequence[NDArray[np.generic]], device: torch.device) -> list[Tensor]:
    """Several arrays with one copy: on CUDA each copy takes the host about ten microseconds, whatever its size."""
    if device.type == "cpu":
        return [to_device(array, device) for array in arrays]
    return unpack(pack(arrays).pin_memory().to(device, non_blocking=True), arrays)


def pack(arrays: Sequence[NDArray[np.generic]]) -> Tensor:
    """All arrays in one tensor [bytes] uint8, each at a multiple of the alignment."""
    packed = torch.empty(sum(_padded_bytes(array) for array in arrays), dtype=torch.uint8)
    view, at = packed.numpy(), 0
    for array in arrays:
        view[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        at += _padded_bytes(array)
    return packed


def unpack(packed: Tensor, arrays: Sequence[NDArray[np.generic]]) -> list[Tensor]:
    """Views into a tensor that `pack` made of arrays of these shapes and dtypes, on any device."""
    found, at = [], 0
    for array in arrays:
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        found.append(packed[at : at + array.nbytes].view(dtype).view(array.shape))
        at += _padded_bytes(array)
    return found


def _padded_bytes(array: NDArray[np.generic]) -> int:
    return -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT


class HostCopy:
    """An asynchronous copy of tensors to the host. It begins at once and waits for nothing that is launched later."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._event: Any = None  # a CUDA event
        self._tensors = list(tensors)
        if tensors and tensors[0].is_cuda:
            self._tensors = [tensor.to("cpu", non_blocking=True) for tensor in tensors]  # pinned, by torch
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> list[Tensor]:
        """The tensors on the host, in their order."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors
