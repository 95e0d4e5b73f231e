"""Stop tokens are excluded until a row has ``min_tokens`` sampled tokens."""

import numpy as np
import torch
from numpy.typing import NDArray

from headrace_worker.core.plan import RowInit
from headrace_worker.sampler.batch import SampleBatch


class MinTokensState:
    """Per row the first position at which a stop token is allowed, and the stop tokens."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.rows: dict[int, tuple[int, NDArray[np.int64]]] = {}

    def init(self, init: RowInit) -> None:
        """Store a row's options."""
        sampling = init.sampling
        ids = [token for token in sampling.stop_token_ids if 0 <= token < self._vocab_size]
        if sampling.min_tokens and ids:
            self.rows[init.row] = (init.prompt_len + sampling.min_tokens, np.array(ids, np.int64))

    def free(self, row: int) -> None:
        """Remove a row's options."""
        self.rows.pop(row, None)

    def apply(self, batch: SampleBatch) -> bool:
        """Set the logits of excluded tokens to -inf; True if any row has some."""
        users = [i for i in batch.users(self.rows) if batch.positions[i] < self.rows[batch.rows[i]][0]]
        if not users:
            return False
        excluded = [self.rows[batch.rows[i]][1] for i in users]
        where = batch.tensor(np.repeat(users, [len(ids) for ids in excluded]), torch.int64)
        batch.logits[where, batch.tensor(np.concatenate(excluded), torch.int64)] = float("-inf")
        return True
