"""The output of a sampling step, on the device until it is read."""

from dataclasses import dataclass, field

from torch import Tensor

from headrace_worker.core.guide import NOTHING_ALLOWED
from headrace_worker.core.plan import SampledLogprobs, StepResult
from headrace_worker.device.rank_device import Download, RankDevice
from headrace_worker.sampler.logprobs import LogprobsOutput

NOT_FINITE = "the model computed values that are not finite; try --dtype float32, or another prompt if it persists"


@dataclass(slots=True)
class SampleOutput:
    """Tokens of R rows. Where ``finite`` is False the row's logits were not finite and its token is meaningless; where
    ``drawable`` is False no token was allowed.

    The copy to the host begins here: reading it later does not wait for steps that were launched in between.
    """

    device: RankDevice
    tokens: Tensor  # [R] int64
    finite: Tensor  # [R] bool
    logprobs: LogprobsOutput | None
    drawable: Tensor | None = None  # [R] bool; None when no row has a mask or bad words
    scores: LogprobsOutput | None = None  # of known tokens, in order
    _copy: Download = field(init=False)

    def __post_init__(self) -> None:
        logprobs = self.logprobs.tensors if self.logprobs is not None else ()
        drawable = () if self.drawable is None else (self.drawable,)
        scores = self.scores.tensors if self.scores is not None else ()
        self._copy = self.device.download((self.tokens, self.finite, *scores, *logprobs, *drawable))

    def to_result(self, step: int) -> StepResult:
        """Everything on the host; waits for this step."""
        tokens, finite, *rest = self._copy.wait()
        scored: list[SampledLogprobs] = []
        if self.scores is not None:
            scored = list(self.scores.read(*rest[:3]).values())
            del rest[:3]
        drawable = rest.pop().tolist() if self.drawable is not None else ()
        failed = {index: NOTHING_ALLOWED for index, good in enumerate(drawable) if not good}
        not_finite = [index for index, good in enumerate(finite.tolist()) if not good]
        failed |= dict.fromkeys(not_finite, NOT_FINITE)
        logprobs: dict[int, SampledLogprobs] = {}
        if self.logprobs is not None:
            logprobs = {index: entry for index, entry in self.logprobs.read(*rest).items() if index not in failed}
        return StepResult(step, tokens.tolist(), logprobs, failed, not_finite, scored)
