"""Stable rows: each running request's tokens and its block tables, on the device; the tables also on the host.

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
    """Tokens [max_rows + 1, max_len + 1] int32 on the device, and per cache group block ids [max_rows + 1, entries].

    Block ids are on the host and on the device: a step sends what has changed since the one before (`take_changes`),
    whatever the length of a table. On a CPU both are the same memory. The last row is a spare one, which nothing reads:
    recorded steps store there what they draw for padding.

    A row's unknown tokens are zero from its initialisation on, and on the host its table entries beyond the allocated
    blocks, too (null block); on the device these may be of earlier sequences.
    """

    def __init__(self, layout: CacheLayout, max_rows: int, max_len: int, device: RankDevice) -> None:
        self.max_rows = max_rows
        self.max_len = max_len
        self.device = device
        # One more column: the token after the last position may be sampled, though never computed.
        self.tokens = torch.zeros((max_rows + 1, max_len + 1), dtype=torch.int32, device=device.torch_device)
        entries = -(-max_len // layout.block_size)
        self.tables: NDArray[np.int32] = np.zeros((len(layout.groups), max_rows + 1, entries), np.int32)
        self.device_tables = torch.from_numpy(self.tables)  # [groups, max_rows + 1, entries]
        if device.asynchronous:
            self.device_tables = torch.zeros_like(self.device_tables, device=device.torch_device)
        self.uses = np.full(max_rows, -1, np.int64)
        self._places: list[NDArray[np.int64]] = []  # flat indexes of tables that the device does not know yet

    @property
    def spare(self) -> int:
        return self.max_rows

    @property
    def spare_place(self) -> int:
        """The place of a table's entry that nothing reads, for `store_changes`."""
        return self.spare * int(self.tables.shape[2])

    def initialise(self, init: RowInit) -> None:
        """Reset all state of a row for a new request."""
        row, count = init.row, len(init.token_ids)
        self.tokens[row, count:].zero_()
        self.tokens[row, :count] = to_device(np.array(init.token_ids, np.int32), self.device)
        self.tables[:, row] = 0
        self.uses[row] = init.row_use

    def free(self, row: int) -> None:
        self.uses[row] = -1

    def update_table(self, update: TableUpdate) -> None:
        count = len(update.block_ids)
        self.tables[update.group, update.row, update.first : update.first + count] = update.block_ids
        if self.device.asynchronous:
            _, rows, entries = self.tables.shape
            first = (update.group * rows + update.row) * entries + update.first
            self._places.append(np.arange(first, first + count))

    def take_changes(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Entries of the tables that have changed since the last call: their places in all of them, and block ids."""
        changed, self._places = self._places, []
        places = np.concatenate(changed) if changed else np.zeros(0, np.int64)
        return places, self.tables.reshape(-1)[places]  # a place twice: with the newest id both times

    def store_changes(self, places: Tensor, blocks: Tensor) -> None:
        """Writes what `take_changes` returned, on the device."""
        if places.shape[0]:
            self.device_tables.view(-1)[places] = blocks

    def gather_tokens(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Token ids [T] int32 at (row, position) pairs."""
        return self.tokens[rows, positions]

    def store_tokens(self, rows: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Write sampled tokens [R] to their positions."""
        self.tokens[rows, positions] = tokens.to(torch.int32)
