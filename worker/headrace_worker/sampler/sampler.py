"""Samples tokens from logits.

    raw logits ─▶ (kept for logprobs) ─▶ logit_bias ─▶ min_tokens ─▶ bad_words ─▶ masks ─▶ penalties ─▶ draw
         └── no row of the batch uses any of these, as in most batches ────────────────────────────────┘

`draw` (``headrace_kernels.ops``) has temperature, min-p, top-k, top-p and the noise. A row's token depends on its own
logits, options and noise alone.
"""

from collections.abc import Mapping, Sequence
from math import inf, log

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_kernels import DrawOptions, draw
from headrace_worker.core.guide import Mask
from headrace_worker.core.plan import RowInit
from headrace_worker.device.rank_device import RankDevice
from headrace_worker.device.staging import all_to_device
from headrace_worker.sampler.bad_words import BadWordsState
from headrace_worker.sampler.batch import SampleBatch
from headrace_worker.sampler.bias import BiasState
from headrace_worker.sampler.logprobs import LogprobsOutput, LogprobsState
from headrace_worker.sampler.masks import NO_MASKS, MaskState
from headrace_worker.sampler.min_tokens import MinTokensState
from headrace_worker.sampler.noise_key import row_key
from headrace_worker.sampler.output import SampleOutput
from headrace_worker.sampler.penalties import PenaltyState

GREEDY_BELOW = 1e-5  # a temperature this low would only overflow: argmax is used instead


class Sampler:
    """Sampling options of all rows of one engine, one small state per feature."""

    def __init__(self, vocab_size: int, max_rows: int, device: RankDevice) -> None:
        self.vocab_size = vocab_size
        self._device = device
        self._options = DrawOptions(
            torch.zeros((max_rows, 3), device=device.torch_device),
            torch.zeros((max_rows, 2), dtype=torch.int64, device=device.torch_device),
        )
        self._special: set[int] = set()  # rows of which a feature has options
        self._bias = BiasState(vocab_size)
        self._min_tokens = MinTokensState(vocab_size)
        self._bad_words = BadWordsState(vocab_size)
        self._masks = MaskState(vocab_size, device.torch_device)
        self._penalties = PenaltyState(vocab_size, device.torch_device)
        self._logprobs = LogprobsState(vocab_size)
        self._features = (
            self._bias,
            self._min_tokens,
            self._bad_words,
            self._masks,
            self._penalties,
            self._logprobs,
        )

    def init(self, init: RowInit) -> None:
        """Reset a row to the options of a new request."""
        self.free(init.row)
        sampling = init.sampling
        temperature = sampling.temperature if sampling.temperature >= GREEDY_BELOW else 0.0
        numbers = [temperature, sampling.top_p, log(sampling.min_p) if sampling.min_p > 0.0 else -inf]
        integers = [row_key(sampling.seed, sampling.choice_index), max(0, sampling.top_k)]
        arrays: list[NDArray[np.generic]] = [np.array(numbers, np.float32), np.array(integers, np.int64)]
        self._options.numbers[init.row], self._options.integers[init.row] = all_to_device(arrays, self._device)
        for feature in self._features:
            feature.init(init)
        if any(init.row in feature.rows for feature in self._features):
            self._special.add(init.row)

    def free(self, row: int) -> None:
        """Remove a row's options; free rows may be freed again."""
        self._special.discard(row)
        for feature in self._features:
            feature.free(row)

    def is_plain(self, rows: Sequence[int]) -> bool:
        """Whether tokens of these rows follow from the logits, the temperature and the truncation alone."""
        return not self._special or self._special.isdisjoint(rows)

    def draw(self, logits: Tensor, row_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens [R] int64, largest logits [R]) of logits [R, V] in any floating format. Never waits for the device.

        row_ids, positions: [R] int64 on the device.
        """
        return draw(logits, row_ids, positions, self._options)

    def sample(
        self, batch: SampleBatch, masks: Mapping[int, Mask] = NO_MASKS, scores: LogprobsOutput | None = None
    ) -> SampleOutput:
        """Sample one token per row. Overwrites the logits.

        masks: by index into the batch, the allowed tokens. scores: of `score`, passed on.
        """
        if not masks and self.is_plain(batch.rows):
            tokens, peaks = self.draw(batch.logits, batch.row_ids, batch.token_positions)
            return SampleOutput(self._device, tokens, peaks, scores=scores)
        batch.logits = batch.logits.float().contiguous()  # a slice of a padded vocabulary is not contiguous
        peaks = batch.logits.amax(-1)  # a max with NaN is NaN
        raw = self._logprobs.keep_raw(batch)
        self._bias.apply(batch)
        self._min_tokens.apply(batch)
        excluded = [self._bad_words.apply(batch), self._masks.apply(batch, masks)]
        self._penalties.apply(batch)
        tokens, allowed = self.draw(batch.logits, batch.row_ids, batch.token_positions)
        logprobs = raw.finish(tokens, batch) if raw is not None else None
        return SampleOutput(self._device, tokens, peaks, logprobs, allowed if any(excluded) else None, scores)

    def score(self, logits: Tensor, rows: Sequence[int], tokens: Tensor) -> LogprobsOutput:
        """Log-probabilities of known tokens [P], with the best ones that each one's row asks for.

        logits: [P, V]. rows: P row ids.
        """
        return self._logprobs.score(logits.float().contiguous(), rows, tokens.long())
