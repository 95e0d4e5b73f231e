"""Samples tokens from logits.

    raw logits ─▶ (kept for logprobs) ─▶ logit_bias ─▶ min_tokens ─▶ bad_words ─▶ masks ─▶ penalties ─┐
                                                                              temperature 0: argmax ◀─┤
                                                       min-p, top-k, top-p ◀─ / temperature ◀─────────┘
                                                         └─▶ + noise ─▶ argmax

A feature that no row of the batch uses costs nothing; a row's token depends on its own logits, options and noise alone.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from headrace_kernels import gumbel_argmax, row_max
from headrace_worker.core.guide import Mask
from headrace_worker.core.plan import RowInit
from headrace_worker.device.rank_device import RankDevice
from headrace_worker.sampler.bad_words import BadWordsState
from headrace_worker.sampler.batch import SampleBatch
from headrace_worker.sampler.bias import BiasState
from headrace_worker.sampler.logprobs import LogprobsOutput, LogprobsState
from headrace_worker.sampler.masks import NO_MASKS, MaskState
from headrace_worker.sampler.min_tokens import MinTokensState
from headrace_worker.sampler.noise_key import absorb, row_key
from headrace_worker.sampler.output import SampleOutput
from headrace_worker.sampler.penalties import PenaltyState
from headrace_worker.sampler.truncation import TruncationState, draw_truncated

GREEDY_BELOW = 1e-5  # a temperature this low would only overflow: argmax is used instead


class Sampler:
    """Sampling options of all rows of one engine, one small state per feature."""

    def __init__(self, vocab_size: int, max_rows: int, device: RankDevice) -> None:
        self.vocab_size = vocab_size
        self._device = device
        self._temperatures = np.zeros(max_rows, np.float32)
        self._keys = np.zeros(max_rows, np.int64)  # noise keys without the position
        self._bias = BiasState(vocab_size)
        self._min_tokens = MinTokensState(vocab_size)
        self._bad_words = BadWordsState(vocab_size)
        self._masks = MaskState(vocab_size, device.torch_device)
        self._penalties = PenaltyState(vocab_size, device.torch_device)
        self._truncation = TruncationState(vocab_size)
        self._logprobs = LogprobsState(vocab_size)
        self._features = (
            self._bias,
            self._min_tokens,
            self._bad_words,
            self._masks,
            self._penalties,
            self._truncation,
            self._logprobs,
        )

    def init(self, init: RowInit) -> None:
        """Reset a row to the options of a new request."""
        self.free(init.row)
        sampling = init.sampling
        self._temperatures[init.row] = sampling.temperature if sampling.temperature >= GREEDY_BELOW else 0.0
        self._keys[init.row] = row_key(sampling.seed, sampling.choice_index)
        for feature in self._features:
            feature.init(init)

    def free(self, row: int) -> None:
        """Remove a row's options; free rows may be freed again."""
        for feature in self._features:
            feature.free(row)

    def sample(
        self,
        logits: Tensor,
        rows: Sequence[int],
        positions: Sequence[int],
        token_rows: Tensor,
        masks: Mapping[int, Mask] = NO_MASKS,
        scores: LogprobsOutput | None = None,
    ) -> SampleOutput:
        """Sample one token per row.

        logits: [R, V] float32, overwritten. rows: R row ids, each at most once. positions: of the tokens to sample;
        ``token_rows[row, :position]`` are the row's known tokens, outputs of earlier steps included. masks: by index
        into rows, the allowed tokens. scores: of `score`, passed on.
        """
        logits = logits.contiguous()  # a slice of a padded vocabulary is not contiguous
        batch = SampleBatch(self._device, logits, rows, positions, token_rows)
        peaks, best = row_max(logits)  # a max with NaN is NaN, so the peak shows whether a row is finite
        finite = peaks.isfinite()
        raw = self._logprobs.keep_raw(batch)
        changed = [self._bias.apply(batch), self._min_tokens.apply(batch)]
        excluded = [self._bad_words.apply(batch), self._masks.apply(batch, masks)]
        changed += [*excluded, self._penalties.apply(batch)]
        drawing = np.flatnonzero(self._temperatures[np.asarray(rows, np.int64)]).tolist()
        if any(changed) and len(drawing) < len(rows):
            best = row_max(logits)[1]
        drawable = logits.amax(-1) > float("-inf") if any(excluded) else None
        tokens = self._draw(batch, best, drawing) if drawing else best
        logprobs = raw.finish(tokens, batch) if raw is not None else None
        return SampleOutput(self._device, tokens, finite, logprobs, drawable, scores)

    def score(self, logits: Tensor, rows: Sequence[int], tokens: Tensor) -> LogprobsOutput:
        """Log-probabilities of known tokens [P], with the best ones that each one's row asks for.

        logits: [P, V] float32. rows: P row ids.
        """
        return self._logprobs.score(logits.contiguous(), rows, tokens.long())

    def _draw(self, batch: SampleBatch, tokens: Tensor, drawing: list[int]) -> Tensor:
        """Random tokens for the rows ``drawing`` of the batch, the given ones for the rest."""
        cut = self._truncation.rows
        plain = [i for i in drawing if batch.rows[i] not in cut]
        truncated = [i for i in drawing if batch.rows[i] in cut] if len(plain) < len(drawing) else []
        users = np.array(plain + truncated)
        rows = np.asarray(batch.rows, np.int64)[users]
        positions = np.asarray(batch.positions, np.int64)[users]
        noise = absorb(torch.from_numpy(self._keys[rows]), torch.from_numpy(positions)).numpy()
        index, temperatures, keys = batch.tensors(users, self._temperatures[rows, None], noise)
        if plain:
            of = slice(len(plain))
            scores = self._scaled(batch, index[of], temperatures[of])
            tokens[index[of]] = gumbel_argmax(scores, keys[of])
        if truncated:
            of = slice(len(plain), None)
            scores = self._scaled(batch, index[of], temperatures[of])
            tokens[index[of]] = draw_truncated(scores, keys[of], self._truncation.gather(batch, truncated))
        return tokens

    def _scaled(self, batch: SampleBatch, index: Tensor, temperatures: Tensor) -> Tensor:
        """logits / temperature [A, V] of some rows."""
        if len(index) == len(batch.rows):
            return batch.logits.div_(temperatures)
        return batch.logits[index].div_(temperatures)
