"""Inputs of one sampling step. Shapes: R rows to sample, V vocabulary, A rows that use a feature."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_worker.device.rank_device import RankDevice
from headrace_worker.device.staging import all_to_device


@dataclass(slots=True)
class SampleBatch:
    """Logits [R, V] float32 are changed in place, feature by feature."""

    device: RankDevice
    logits: Tensor
    rows: Sequence[int]  # [R] row ids
    positions: Sequence[int]  # [R] position of the token to sample = number of known tokens
    token_rows: Tensor  # [max_rows, max_len] known tokens by row id

    def users(self, feature: Collection[int]) -> list[int]:
        """Indices into the batch of the rows that use a feature."""
        return [i for i, row in enumerate(self.rows) if row in feature] if feature else []

    def tensor(self, values: Sequence[int] | Sequence[float] | NDArray[np.generic], dtype: torch.dtype) -> Tensor:
        """Host values on the device of the logits; the copy does not wait for the device."""
        return self.device.upload(torch.as_tensor(values, dtype=dtype))

    def tensors(self, *arrays: NDArray[np.generic]) -> list[Tensor]:
        """Several arrays on the device of the logits, with one copy that does not wait for it."""
        return all_to_device(arrays, self.device)
