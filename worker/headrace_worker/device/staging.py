"""Copies to the device, without waiting."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_worker.device.rank_device import RankDevice

_ALIGNMENT = 16  # bytes: required by the widest loads of a kernel


def to_device(array: NDArray[np.generic], device: RankDevice) -> Tensor:
    """The array as a tensor on the device: on a CPU without a copy, on a GPU without waiting."""
    return device.upload(torch.from_numpy(np.ascontiguousarray(array)))


def all_to_device(arrays: Sequence[NDArray[np.generic]], device: RankDevice) -> list[Tensor]:
    """Several arrays with one copy: on CUDA each copy takes the host about ten microseconds, whatever its size."""
    if not device.asynchronous:
        return [to_device(array, device) for array in arrays]
    return unpack(device.upload(pack(arrays)), arrays)


def pack(arrays: Sequence[NDArray[np.generic]]) -> Tensor:
    """All arrays in one tensor [bytes] uint8, each at a multiple of the alignment."""
    packed = torch.empty(packed_bytes(arrays), dtype=torch.uint8)
    pack_into(packed, arrays)
    return packed


def pack_into(packed: Tensor, arrays: Sequence[NDArray[np.generic]]) -> None:
    """`pack` into host memory [packed_bytes(arrays)] uint8."""
    view, at = packed.numpy(), 0
    for array in arrays:
        view[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        at += _padded_bytes(array)


def packed_bytes(arrays: Sequence[NDArray[np.generic]]) -> int:
    """The size of what `pack` makes of them."""
    return sum(_padded_bytes(array) for array in arrays)


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
