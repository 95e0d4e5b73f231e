"""Copies to the device through host memory that is allocated once.

A copy from pageable memory waits for everything that the stream has, and pinning memory for each copy may wait for the
device. A slot is written again only once its last copy is done, which with enough slots it is by then.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_worker.device.rank_device import Mark, RankDevice
from headrace_worker.device.staging import pack_into, packed_bytes, to_device, unpack


class PinnedRing:
    """Slots of pinned memory, used in turn. For one thread."""

    def __init__(self, device: RankDevice, slots: int, size: int) -> None:
        """`slots`: copies that may be under way at a time. `size`: bytes of a slot, which grows if it must."""
        self._device = device
        self._slots: list[Tensor] = []
        self._marks: list[Mark | None] = [None] * slots
        self._next = 0
        if device.asynchronous:
            self._slots = [device.host_memory((size,), torch.uint8) for _ in range(slots)]

    def upload(self, arrays: Sequence[NDArray[np.generic]]) -> list[Tensor]:
        """The arrays as tensors on the device, with one copy that waits for nothing; on a CPU without a copy."""
        if not self._device.asynchronous:
            return [to_device(array, self._device) for array in arrays]
        place, self._next = self._next, (self._next + 1) % len(self._slots)
        if (last := self._marks[place]) is not None:
            last.synchronize()
        size = packed_bytes(arrays)
        if size > self._slots[place].shape[0]:
            self._slots[place] = self._device.host_memory((size,), torch.uint8)
        slot = self._slots[place][:size]
        pack_into(slot, arrays)
        uploaded = self._device.upload(slot)
        self._marks[place] = self._device.mark()
        return unpack(uploaded, arrays)
