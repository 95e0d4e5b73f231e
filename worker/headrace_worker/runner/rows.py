"""Stable rows: each running request's tokens, on the device, and its block tables, mirrored on the host.

Only the sampled tokens are unknown to the host when a step is launched; all other inputs of a step are plain integers,
gathered with numpy and sent to the device in one copy.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_worker.core.layout import CacheLayout
from headrace_worker.core.plan import RowInit, TableUpdate
from headrace_worker.device.rank_device import RankDevice
from headrace_worker.device.staging import to_device


class RowState:
    """Tokens [max_rows + 1, max_len + 1] int32 on the device; per cache group block ids [max_rows, entries] on the
    host.

    The last row is a spare one, which nothing reads: recorded steps store there what they draw for padding.

    A row's unknown tokens, and its table entries beyond the allocated blocks, are zero (null block) from its
    initialisation on.
    """

    def __init__(self, layout: CacheLayout, max_rows: int, max_len: int, device: RankDevice) -> None:
        self.max_rows = max_rows
        self.max_len = max_len
        self.device = device
        # One more column: the token after the last position may be sampled, though never computed.
        self.tokens = torch.zeros((max_rows + 1, max_len + 1), dtype=torch.int32, device=device.torch_device)
        entries = -(-max_len // layout.block_size)
        self.tables: list[NDArray[np.int32]] = [np.zeros((max_rows, entries), np.int32) for _ in layout.groups]
        self.uses = np.full(max_rows, -1, np.int64)

    @property
    def spare(self) -> int:
        return self.max_rows

    def initialise(self, init: RowInit) -> None:
        """Reset all state of a row for a new request."""
        row, count = init.row, len(init.token_ids)
        known = np.zeros(self.max_len + 1, np.int32)
        known[:count] = init.token_ids
        self.tokens[row] = to_device(known, self.device)
        for table in self.tables:
            table[row] = 0
        self.uses[row] = init.row_use

    def free(self, row: int) -> None:
        self.uses[row] = -1

    def update_table(self, update: TableUpdate) -> None:
        self.tables[update.group][update.row, update.first : update.first + len(update.block_ids)] = update.block_ids

    def gather_tokens(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Token ids [T] int32 at (row, position) pairs."""
        return self.tokens[rows, positions]

    def store_tokens(self, rows: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Write sampled tokens [R] to their positions."""
        self.tokens[rows, positions] = tokens.to(torch.int32)
