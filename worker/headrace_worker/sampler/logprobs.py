"""Log-probabilities of the raw logits: the sampled or known token's and the best ones."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace_kernels import row_logsumexp
from headrace_worker.core.plan import RowInit, SampledLogprobs
from headrace_worker.sampler.batch import SampleBatch


@dataclass(slots=True)
class LogprobsOutput:
    """Values on the device, not yet read, of the A rows that request log-probabilities."""

    index: Sequence[int]  # [A] into the batch
    counts: Sequence[int]  # [A] how many of the best
    chosen: Tensor  # [A] float32
    top_ids: Tensor  # [A, n] int64, best first
    top: Tensor  # [A, n] float32

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tensors to copy to the host."""
        return self.chosen, self.top_ids, self.top

    def read(self, chosen: Tensor, top_ids: Tensor, top: Tensor) -> dict[int, SampledLogprobs]:
        """By index into the batch, from `tensors` on the host."""
        columns = (self.index, self.counts, chosen.tolist(), top_ids.tolist(), top.tolist())
        return {
            index: SampledLogprobs(chosen, top_ids[:count], top[:count])
            for index, count, chosen, top_ids, top in zip(*columns, strict=True)
        }


@dataclass(slots=True)
class RawLogits:
    """Raw logits [A, V] of the rows that request log-probabilities, kept while the batch's are changed."""

    index: list[int]
    counts: list[int]
    logits: Tensor

    def finish(self, tokens: Tensor, batch: SampleBatch) -> LogprobsOutput:
        """Log-probabilities once tokens [R] are sampled."""
        return _logprobs(self.logits, tokens[batch.tensor(self.index, torch.int64)], self.index, self.counts)


def _logprobs(logits: Tensor, tokens: Tensor, index: Sequence[int], counts: Sequence[int]) -> LogprobsOutput:
    """The log-probabilities of tokens [A], from raw logits [A, V]."""
    log_total = row_logsumexp(logits)[:, None]
    top, top_ids = logits.topk(max(counts), dim=-1)
    chosen = (logits.gather(1, tokens[:, None]) - log_total)[:, 0]
    return LogprobsOutput(index, counts, chosen, top_ids, top - log_total)


class LogprobsState:
    """Per row the number of best tokens to report."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.rows: dict[int, int] = {}
        self._prompts: dict[int, int] = {}

    def init(self, init: RowInit) -> None:
        """Store a row's options."""
        if init.sampling.logprobs is not None:
            self.rows[init.row] = min(init.sampling.logprobs, self._vocab_size)
        if init.sampling.prompt_logprobs is not None:
            self._prompts[init.row] = min(init.sampling.prompt_logprobs, self._vocab_size)

    def free(self, row: int) -> None:
        """Remove a row's options."""
        self.rows.pop(row, None)
        self._prompts.pop(row, None)

    def score(self, logits: Tensor, rows: Sequence[int], tokens: Tensor) -> LogprobsOutput:
        return _logprobs(logits, tokens, range(len(rows)), [self._prompts[row] for row in rows])

    def keep_raw(self, batch: SampleBatch) -> RawLogits | None:
        """A copy of the raw logits of the rows that request log-probabilities; None if there are none."""
        users = batch.users(self.rows)
        if not users:
            return None
        copy = batch.logits[batch.tensor(users, torch.int64)]
        return RawLogits(users, [self.rows[batch.rows[i]] for i in users], copy)
