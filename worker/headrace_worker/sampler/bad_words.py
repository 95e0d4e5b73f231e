"""Sequences of tokens that an output never contains (``bad_words``).

The last token of a sequence is excluded where the output ends with the tokens before it. Only sampled tokens count, as
in vLLM: a prompt may end with the beginning of a sequence. The outputs are compared on the device, where the newest are
known, so nothing is kept between steps. Legend: N sequences of a row, P tokens of theirs before the last ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from headrace_worker.core.plan import RowInit
from headrace_worker.device.staging import all_to_device
from headrace_worker.sampler.batch import SampleBatch


@dataclass(slots=True)
class _Row:
    """The sequences, shortest first: an output of n tokens may end with the beginnings of the first few only."""

    prompt_len: int
    before: NDArray[np.int64]  # [N] number of tokens before the last one
    last: NDArray[np.int64]  # [N] the last token
    ends: NDArray[np.int64]  # [N] where the tokens before it end in the following arrays
    tokens: NDArray[np.int64]  # [P]
    distance: NDArray[np.int64]  # [P] of each of these from the token to sample
    sequence: NDArray[np.int64]  # [P] index of its sequence


def _row(prompt_len: int, sequences: Sequence[tuple[int, ...]]) -> _Row:
    ordered = sorted(sequences, key=len)
    before = np.array([len(ids) - 1 for ids in ordered], np.int64)
    return _Row(
        prompt_len,
        before,
        np.array([ids[-1] for ids in ordered], np.int64),
        before.cumsum(),
        np.array([token for ids in ordered for token in ids[:-1]], np.int64),
        np.array([back for count in before.tolist() for back in range(count, 0, -1)], np.int64),
        np.repeat(np.arange(len(ordered)), before),
    )


class BadWordsState:
    """Per row its sequences."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.rows: dict[int, _Row] = {}

    def init(self, init: RowInit) -> None:
        """Store a row's options; a sequence with an id outside the vocabulary is never sampled and left out."""
        words = [word for word in init.sampling.bad_words if word and max(word) < self._vocab_size]
        if words:
            self.rows[init.row] = _row(init.prompt_len, words)

    def free(self, row: int) -> None:
        """Remove a row's options."""
        self.rows.pop(row, None)

    def apply(self, batch: SampleBatch) -> bool:
        """Set the logits of excluded tokens to -inf; True if any row has sequences of which one may end here."""
        columns: list[tuple[NDArray[np.int64], ...]] = []
        sequences = 0
        for i in batch.users(self.rows):
            row, position = self.rows[batch.rows[i]], batch.positions[i]
            count = int(np.searchsorted(row.before, position - row.prompt_len, "right"))
            if not count:
                continue
            known = int(row.ends[count - 1])
            columns.append(
                (
                    np.full(count, i),
                    row.last[:count],
                    np.full(known, batch.rows[i]),
                    position - row.distance[:known],
                    row.tokens[:known],
                    row.sequence[:known] + sequences,
                )
            )
            sequences += count
        if not columns:
            return False
        joined = [np.concatenate(column) for column in zip(*columns, strict=True)]
        where, last, rows, places, expected, sequence = all_to_device(joined, batch.device)
        differs = (batch.token_rows[rows, places] != expected).to(torch.int32)
        differing = torch.zeros_like(where, dtype=torch.int32).index_add_(0, sequence, differs)
        values = torch.zeros_like(where, dtype=torch.float32).masked_fill_(differing == 0, float("-inf"))
        batch.logits.index_put_((where, last), values, accumulate=True)  # the same token may end several sequences
        return True
