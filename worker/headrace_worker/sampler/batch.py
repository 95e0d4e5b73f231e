"""Inputs of one sampling step. Shapes: R rows to sample, V vocabulary, A rows that use a feature."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_worker.device.rank_device import RankDevice


@dataclass(slots=True)
class SampleBatch:
    """Logits [R, V] are changed in place, feature by feature, in float32."""

    device: RankDevice
    logits: Tensor
    rows: Sequence[int]  # [R] row ids
    positions: Sequence[int]  # [R] position of the token to sample = number of known tokens
    row_ids: Tensor  # [R] int64: the same on the device
    token_positions: Tensor  # [R] int64
    token_rows: Tensor  # [rows, max_len] known tokens by row id

    def users(self, feature: Collection[int]) -> list[int]:
        """Indices into the batch of the rows that use a feature."""
        return [i for i, row in enumerate(self.rows) if row in feature] if feature else []

    def tensor(self, values: Sequence[int] | Sequence[float] | NDArray[np.generic], dtype: torch.dtype) -> Tensor:
        """Host values on the device of the logits; the copy does not wait for the device."""
        return self.device.upload(torch.as_tensor(values, dtype=dtype))
