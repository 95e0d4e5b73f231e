"""Uploads through pinned memory that is allocated once and written again only when its copy is done."""

import threading
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_worker.device.cpu import CpuDevice
from headrace_worker.device.pinned_ring import PinnedRing
from support.worker.recording_device import RecordingDevice

ARRAYS: list[NDArray[Any]] = [np.arange(3, dtype=np.int64), np.arange(5, dtype=np.int32), np.array([7], np.int64)]


class PinnedDevice(RecordingDevice):
    """Keeps the host memory that was allocated, and where each upload came from."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[Tensor] = []
        self.uploaded: list[int] = []  # addresses
        self.use()

    def host_memory(self, shape: object, dtype: torch.dtype) -> Tensor:
        self.pinned.append(super().host_memory(shape, dtype))  # type: ignore[arg-type]
        return self.pinned[-1]

    def upload(self, tensor: Tensor) -> Tensor:
        self.uploaded.append(tensor.data_ptr())
        return super().upload(tensor)

    @property
    def noted(self) -> list[str]:
        return self.calls[threading.current_thread().name]


def equal(tensors: list[Tensor]) -> bool:
    return all(np.array_equal(tensor.numpy(), array) for tensor, array in zip(tensors, ARRAYS, strict=True))


def test_each_upload_is_one_copy_from_the_next_slot() -> None:
    device = PinnedDevice()
    ring = PinnedRing(device, 2, 128)
    allocated = [slot.data_ptr() for slot in device.pinned]
    device.calls.clear()
    assert all(equal(ring.upload(ARRAYS)) for _ in range(3))
    assert device.uploaded == [*allocated, allocated[0]]
    assert device.noted == [*["upload", "mark default"] * 2, "mark.synchronize default", "upload", "mark default"]


def test_a_slot_grows_once_its_copy_is_done() -> None:
    device = PinnedDevice()
    ring = PinnedRing(device, 1, 16)
    ring.upload([np.array([1], np.int64)])
    device.calls.clear()
    assert equal(ring.upload(ARRAYS))
    assert device.noted == ["mark.synchronize default", "host_memory", "upload", "mark default"]
    assert equal(ring.upload(ARRAYS)) and len(device.pinned) == 2


def test_a_cpu_has_the_arrays_without_a_copy() -> None:
    array = np.arange(4, dtype=np.int64)
    (tensor,) = PinnedRing(CpuDevice(), 2, 128).upload([array])
    array[0] = 9
    assert tensor.tolist() == [9, 1, 2, 3]
