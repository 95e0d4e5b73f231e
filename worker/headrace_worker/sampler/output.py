"""The output of a sampling step, on the device until it is read."""

from dataclasses import dataclass, field
from math import inf, isfinite

from torch import Tensor

from headrace_worker.core.guide import NOTHING_ALLOWED
from headrace_worker.core.plan import SampledLogprobs, StepResult
from headrace_worker.device.rank_device import Download, RankDevice
from headrace_worker.sampler.logprobs import LogprobsOutput

NOT_FINITE = "the model computed values that are not finite; try --dtype float32, or another prompt if it persists"


@dataclass(slots=True)
class SampleOutput:
    """Tokens of R rows. Where a row's largest logit is not finite, its token is meaningless; where its largest allowed
    logit is -inf, no token was allowed.

    The copy to the host begins here: reading it later does not wait for steps that were launched in between.
    """

    device: RankDevice
    tokens: Tensor  # [R] int64
    peaks: Tensor  # [R] float32: the largest logit
    logprobs: LogprobsOutput | None = None
    allowed: Tensor | None = None  # [R] float32: the largest allowed logit; None when no row has a mask or bad words
    scores: LogprobsOutput | None = None  # log-probabilities of known tokens, in order
    stored: bool = False  # the tokens are in their rows: a recorded step has drawn them
    _copy: Download = field(init=False)

    def __post_init__(self) -> None:
        logprobs = self.logprobs.tensors if self.logprobs is not None else ()
        allowed = () if self.allowed is None else (self.allowed,)
        scores = self.scores.tensors if self.scores is not None else ()
        self._copy = self.device.download((self.tokens, self.peaks, *scores, *logprobs, *allowed))

    def to_result(self, step: int) -> StepResult:
        """Everything on the host; waits for this step."""
        tokens, peaks, *rest = self._copy.wait()
        scored: list[SampledLogprobs] = []
        if self.scores is not None:
            scored = list(self.scores.read(*rest[:3]).values())
            del rest[:3]
        allowed = rest.pop().tolist() if self.allowed is not None else ()
        failed = {index: NOTHING_ALLOWED for index, peak in enumerate(allowed) if peak == -inf}
        not_finite = [index for index, peak in enumerate(peaks.tolist()) if not isfinite(peak)]
        failed |= dict.fromkeys(not_finite, NOT_FINITE)
        logprobs: dict[int, SampledLogprobs] = {}
        if self.logprobs is not None:
            logprobs = {index: entry for index, entry in self.logprobs.read(*rest).items() if index not in failed}
        return StepResult(step, tokens.tolist(), logprobs, failed, not_finite, scored)
