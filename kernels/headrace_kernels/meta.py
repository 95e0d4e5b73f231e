"""The sequences of one step, as input of attention and of layers with recurrent state; and sampling options.

Legend of shape letters in this package: T tokens of the step, S sequences, H query heads, K key/value heads, D head
size, B blocks of the pool, P positions per block, M entries of a block table, V vocabulary, R sampled rows.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor


@dataclass(slots=True)
class AttentionMeta:
    """One per cache group and step, shared by all layers of the group.

    The queries of sequence s are the tokens ``query_starts[s] : query_starts[s + 1]``; its i-th query is at position
    ``seq_lens[s] - query_len + i``. Position p of s is in block ``block_tables[s, p // P]`` at offset ``p % P``. Table
    entries that are completely before the span of every query may be stale: no backend reads them.
    """

    query_starts: Tensor  # [S + 1] int32
    seq_lens: Tensor  # [S] int32, keys per sequence, this step's tokens included
    block_tables: Tensor  # [S, M] int32; with `table_rows`, of more sequences than the step's
    slots: Tensor  # [T] int64, block * P + offset of each new token; negative = write nothing
    max_query_len: int
    max_seq_len: int
    table_rows: Tensor | None = None  # [S] int32, of block_tables, whose row s is that of sequence s if None
    # Plans of a backend, made from the tensors: `replace` makes a meta without plans, for changed tensors.
    plans: dict[Any, Any] = field(default_factory=dict, init=False)

    def gathered(self, block_size: int) -> "AttentionMeta":
        """With the step's own tables, for backends that do not know `table_rows`."""
        if self.table_rows is None:
            return self
        entries = -(-self.max_seq_len // block_size)
        return replace(
            self, block_tables=self.block_tables[:, :entries].index_select(0, self.table_rows), table_rows=None
        )


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorms of each head of the queries and of the keys."""

    query: Tensor  # [D]
    key: Tensor  # [D]
    eps: float


@dataclass(slots=True)
class StateMeta:
    """One per step, shared by all layers with recurrent state. A slot holds the states of one sequence at one position.

    Sequences are computed in S pieces. The tokens of piece s are ``query_starts[s] : query_starts[s + 1]``; several
    pieces of one sequence follow each other, and each reads the slot that the one before wrote. No other piece reads a
    slot that one writes. Slot 0 is all zeros: the state of nothing.
    """

    query_starts: Tensor  # [S + 1] int32
    reads: Tensor  # [S] int32, slot with the state before the first of the tokens
    writes: Tensor  # [S] int32, slot that gets the state after the last one; 0 = it is not kept


@dataclass(frozen=True, slots=True)
class DrawOptions:
    """How the tokens of each row are sampled, by row number, on the device of the logits."""

    numbers: Tensor  # [rows, 3] float32: temperature (0 = the argmax), top_p (1 = off), log(min_p) (-inf = off)
    integers: Tensor  # [rows, 2] int64: noise key without the position, top_k (0 = off)
