"""A step's inputs, gathered from the rows: T tokens of S sequences, of R of which a token is sampled."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headrace_kernels.meta import AttentionMeta, StateMeta
from headrace_worker.core.kv.blocks import NULL_BLOCK
from headrace_worker.core.plan import Work
from headrace_worker.device.staging import all_to_device
from headrace_worker.runner.rows import RowState

PIECES = 2  # that recorded steps have for each sequence in recurrent layers: up to a snapshot, and the rest


@dataclass(slots=True)
class Batch:
    """Flat inputs of one step, on the device."""

    token_rows: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    metas: list[AttentionMeta]  # by cache group
    changes: tuple[Tensor, Tensor]  # changes of block tables, see RowState.take_changes; a recorded step stores them
    states: StateMeta
    sample_index: Tensor  # [R + P] int64: index of each sampled row's last token among the T, then of scored positions
    drawn_rows: Tensor  # [R] int64: rows of the tokens to sample
    drawn_positions: Tensor  # [R] int64
    scored: Tensor  # [2, P] int64: rows and positions of the known tokens that get log-probabilities
    scored_rows: list[int]  # [P] the rows for the host
    sample_rows: list[int]  # [R] the same for the host
    sample_positions: list[int]  # [R] position of the token to sample
    recorded: Any = None  # the recorded step that owns these buffers, if any


@dataclass(slots=True)
class HostBatch:
    """The same as numpy arrays, before they go to the device."""

    token_rows: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T]
    query_starts: NDArray[np.int32]  # [S + 1]
    seq_lens: NDArray[np.int32]  # [S]
    table_rows: NDArray[np.int32]  # [S]
    changed_places: NDArray[np.int64]  # places in block tables
    changed_blocks: NDArray[np.int32]
    slots: list[NDArray[np.int64]]  # by cache group: [T]
    state_starts: NDArray[np.int32]  # [pieces + 1]: the tokens of each piece that recurrent layers compute
    state_slots: NDArray[np.int32]  # [2, pieces]: read, written
    sample_index: NDArray[np.int64]  # [R + P]
    drawn_rows: NDArray[np.int64]  # [R]
    drawn_positions: NDArray[np.int64]  # [R]
    scored: NDArray[np.int64]  # [2, P]
    max_query_len: int
    max_seq_len: int

    @property
    def arrays(self) -> list[NDArray[Any]]:
        """Everything that goes to the device, in the order of `over`."""
        return [
            self.token_rows,
            self.positions,
            self.sample_index,
            self.drawn_rows,
            self.drawn_positions,
            self.scored,
            self.query_starts,
            self.seq_lens,
            self.table_rows,
            self.changed_places,
            self.changed_blocks,
            self.state_starts,
            *self.state_slots,
            *self.slots,
        ]

    def over(self, tensors: Sequence[Tensor], tables: Tensor) -> Batch:
        """A batch of `arrays` that were copied to the device, where all rows' tables are."""
        token_rows, positions, sample_index, drawn_rows, drawn_positions, scored, *rest = tensors
        query_starts, seq_lens, rows, places, blocks, *pieces = rest[:8]
        metas = [
            AttentionMeta(query_starts, seq_lens, table, slots, self.max_query_len, self.max_seq_len, rows)
            for table, slots in zip(tables, rest[8:], strict=True)
        ]
        return Batch(
            token_rows,
            positions,
            metas,
            (places, blocks),
            StateMeta(*pieces),
            sample_index,
            drawn_rows,
            drawn_positions,
            scored,
            self.scored[0].tolist(),
            self.drawn_rows.tolist(),
            self.drawn_positions.tolist(),
        )

    def padded(
        self, tokens: int, sequences: int, changes: int, max_query_len: int, max_seq_len: int, rows: RowState
    ) -> "HostBatch":
        """Padded to a batch of so many tokens, sequences, every one of which counts as sampled, and changes of tables.

        Added tokens belong to no sequence and have slot -1, which is not written; added sequences are empty, and what
        is drawn for them is stored in the spare row, as are added changes.
        """
        more = tokens - len(self.token_rows)
        empty = sequences - len(self.seq_lens)
        no_pieces = PIECES * sequences - self.state_slots.shape[1]
        undrawn = sequences - len(self.sample_index)
        unchanged = changes - len(self.changed_places)
        slots = [_longer(entry, more, -1) for entry in self.slots]
        return replace(
            self,
            token_rows=_longer(self.token_rows, more, 0),
            positions=_longer(self.positions, more, 0),
            query_starts=_longer(self.query_starts, empty, int(self.query_starts[-1])),
            seq_lens=_longer(self.seq_lens, empty, 0),
            table_rows=_longer(self.table_rows, empty, rows.spare),
            changed_places=_longer(self.changed_places, unchanged, rows.spare_place),
            changed_blocks=_longer(self.changed_blocks, unchanged, NULL_BLOCK),
            slots=slots,
            state_starts=_longer(self.state_starts, no_pieces, int(self.state_starts[-1])),
            state_slots=np.concatenate([self.state_slots, np.zeros((2, no_pieces), np.int32)], axis=1),
            sample_index=_longer(self.sample_index, undrawn, 0),
            drawn_rows=_longer(self.drawn_rows, undrawn, rows.spare),
            drawn_positions=_longer(self.drawn_positions, undrawn, 0),
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
        )


def flatten_work(work: Sequence[Work], rows: RowState, block_size: int, scores: bool = False) -> HostBatch:
    """Concatenate the sequences of the work. No loop over tokens, and nothing read back from the device.

    It takes the changes of the rows' tables: they must be stored, whatever becomes of the batch.
    scores: whether some of it has `scored`.
    """
    size = len(work)  # a column at a time: an array of tuples takes twice as long
    row = np.fromiter([item.row for item in work], np.int64, size)
    start = np.fromiter([item.start for item in work], np.int64, size)
    count = np.fromiter([item.count for item in work], np.int64, size)
    end = start + count
    offsets = np.zeros(size + 1, np.int64)
    np.cumsum(count, out=offsets[1:])
    token_rows = np.repeat(row, count)
    positions = np.arange(offsets[-1]) + np.repeat(start - offsets[:-1], count)
    drawing = np.flatnonzero(np.fromiter([item.sample for item in work], np.bool_, size))
    drawn_rows, drawn_positions = row[drawing], end[drawing]
    scored = np.zeros(0, np.int64)
    if scores:
        counts = np.fromiter([item.scored for item in work], np.int64, size)
        scored = np.repeat(offsets[:-1] + counts - np.cumsum(counts), counts) + np.arange(counts.sum())
    state_starts, state_slots = _state_pieces(work, offsets)
    places, blocks = rows.take_changes()
    entry, offset = np.divmod(positions, block_size)
    return HostBatch(
        token_rows=token_rows,
        positions=positions,
        query_starts=offsets.astype(np.int32),
        seq_lens=end.astype(np.int32),
        table_rows=row.astype(np.int32),
        changed_places=places,
        changed_blocks=blocks,
        slots=[table[token_rows, entry].astype(np.int64) * block_size + offset for table in rows.tables],
        state_starts=state_starts,
        state_slots=state_slots,
        sample_index=np.concatenate([offsets[1:][drawing] - 1, scored]),
        drawn_rows=drawn_rows,
        drawn_positions=drawn_positions,
        scored=np.stack([token_rows[scored], positions[scored] + 1]),
        max_query_len=int(count.max(initial=0)),
        max_seq_len=int(end.max(initial=0)),
    )


def _state_pieces(work: Sequence[Work], offsets: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The starts and slots of the pieces that recurrent layers compute; without slots, of a warm-up, one per item.

    offsets: of the first token of each item.
    """
    if not any([item.state_writes for item in work]):
        return offsets.astype(np.int32), np.zeros((2, len(work)), np.int32)
    starts: list[int] = [0]
    reads: list[int] = []
    writes: list[int] = []
    for item, offset in zip(work, offsets.tolist(), strict=False):
        read = item.state_read
        for end, slot in item.state_writes:
            starts.append(offset + end - item.start)
            reads.append(read)
            writes.append(slot)
            read = slot
    return np.array(starts, np.int32), np.array([reads, writes], np.int32)


def upload(host: HostBatch, rows: RowState) -> Batch:
    """A batch of exactly this work, on the device of the rows, whose tables are current then."""
    batch = host.over(all_to_device(host.arrays, rows.device), rows.device_tables)
    rows.store_changes(*batch.changes)
    return batch


def _longer(array: NDArray[Any], more: int, value: int) -> NDArray[Any]:
    return np.concatenate([array, np.full(more, value, array.dtype)])
