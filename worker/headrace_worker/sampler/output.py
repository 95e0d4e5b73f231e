"""What a sampling step gives back, on the device until somebody asks."""

from dataclasses import dataclass

from torch import Tensor

from headrace_worker.plan import StepResult
from headrace_worker.sampler.logprobs import LogprobsOutput

NOT_FINITE = (
    "The model computed values that are not finite for this request; try float32, or another prompt if it persists."
)


@dataclass(slots=True)
class SampleOutput:
    """Tokens of R rows. Where ``finite`` is False the row's logits were broken and its token means nothing."""

    tokens: Tensor  # [R] int64
    finite: Tensor  # [R] bool
    logprobs: LogprobsOutput | None

    def to_result(self, step: int) -> StepResult:
        """Everything on the host; waits for the device."""
        finite: list[bool] = self.finite.tolist()
        failed = {index: NOT_FINITE for index, good in enumerate(finite) if not good}
        logprobs = self.logprobs.to_host() if self.logprobs is not None else {}
        for index in failed:
            logprobs.pop(index, None)
        return StepResult(step, self.tokens.tolist(), logprobs, failed)
