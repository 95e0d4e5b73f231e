"""The sequences of one step, as input of attention and of layers with recurrent state.

Legend of shape letters in this package: T tokens of the step, S sequences, H query heads, K key/value heads, D head
size, B blocks of the pool, P positions per block, M entries of a block table, V vocabulary, R sampled rows.
"""

from dataclasses import dataclass

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
    block_tables: Tensor  # [S, M] int32
    slots: Tensor  # [T] int64, block * P + offset of each new token; negative = write nothing
    max_query_len: int
    max_seq_len: int


@dataclass(slots=True)
class StateMeta:
    """One per step, shared by all layers with recurrent state. A slot holds the states of one sequence at one position.

    The tokens of sequence s are ``query_starts[s] : query_starts[s + 1]``. Slot 0 is all zeros: the state of nothing.
    A slot that one sequence writes is read and written by no other one.
    """

    query_starts: Tensor  # [S + 1] int32
    reads: Tensor  # [S] int32, slot with the state before the first of the tokens
    writes: Tensor  # [S] int32, slot that gets the state after the last one; 0 = it is not kept
