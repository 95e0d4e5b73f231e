"""Fixed additions to single logits (``logit_bias``)."""

import numpy as np
import torch
from numpy.typing import NDArray

from headrace_worker.core.plan import RowInit
from headrace_worker.sampler.batch import SampleBatch


class BiasState:
    """Per row the biased ids and their values."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.rows: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}

    def init(self, init: RowInit) -> None:
        """Store a row's options; ids outside the vocabulary can never be sampled and are left out."""
        pairs = [pair for pair in init.sampling.logit_bias if 0 <= pair[0] < self._vocab_size]
        if pairs:
            ids, values = zip(*pairs, strict=True)
            self.rows[init.row] = (np.array(ids, np.int64), np.array(values, np.float32))

    def free(self, row: int) -> None:
        """Remove a row's options."""
        self.rows.pop(row, None)

    def apply(self, batch: SampleBatch) -> bool:
        """Add the values; True if any row has some."""
        users = batch.users(self.rows)
        if not users:
            return False
        entries = [self.rows[batch.rows[i]] for i in users]
        where = batch.tensor(np.repeat(users, [len(ids) for ids, _ in entries]), torch.int64)
        ids = batch.tensor(np.concatenate([ids for ids, _ in entries]), torch.int64)
        values = batch.tensor(np.concatenate([values for _, values in entries]), torch.float32)
        batch.logits.index_put_((where, ids), values, accumulate=True)
        return True
