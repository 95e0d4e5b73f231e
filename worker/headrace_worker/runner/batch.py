"""A step's inputs, gathered from the rows: T tokens of S sequences, R of which draw a token."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from headrace_kernels.meta import AttentionMeta
from headrace_worker.plan import Work
from headrace_worker.runner.rows import RowState
from headrace_worker.runner.transfer import to_device


@dataclass(slots=True)
class Batch:
    """Flat inputs of one step, on the device."""

    token_rows: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    metas: list[AttentionMeta]  # by cache group
    sample_index: Tensor  # [R] int64: which of the T tokens is each drawing row's last
    sample_rows: list[int]  # [R]
    sample_positions: list[int]  # [R] position of the token to draw


def gather(work: Sequence[Work], rows: RowState, block_size: int) -> Batch:
    """Lay the work out one after the other. No loop over tokens, and nothing read back from the device."""
    plan = np.array([(item.row, item.start, item.count, item.sample) for item in work], np.int64).reshape(-1, 4)
    row, start, count = plan[:, 0], plan[:, 1], plan[:, 2]
    end = start + count
    offsets = np.zeros(len(work) + 1, np.int64)
    np.cumsum(count, out=offsets[1:])
    token_rows = np.repeat(row, count)
    positions = np.arange(offsets[-1]) + np.repeat(start - offsets[:-1], count)
    drawing = np.flatnonzero(plan[:, 3])
    longest = int(end.max(initial=0))
    entries = -(-longest // block_size)
    device = rows.device
    query_starts = to_device(offsets.astype(np.int32), device)
    seq_lens = to_device(end.astype(np.int32), device)
    entry, offset = np.divmod(positions, block_size)
    metas = [
        AttentionMeta(
            query_starts=query_starts,
            seq_lens=seq_lens,
            block_tables=to_device(table[row, :entries], device),
            slots=to_device(table[token_rows, entry].astype(np.int64) * block_size + offset, device),
            max_query_len=int(count.max(initial=0)),
            max_seq_len=longest,
        )
        for table in rows.tables
    ]
    return Batch(
        token_rows=to_device(token_rows, device),
        positions=to_device(positions, device),
        metas=metas,
        sample_index=to_device(offsets[1:][drawing] - 1, device),
        sample_rows=row[drawing].tolist(),
        sample_positions=end[drawing].tolist(),
    )
