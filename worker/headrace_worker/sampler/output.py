"""What a sampling step gives back, on the device until somebody asks."""

from dataclasses import dataclass, field

from torch import Tensor

from headrace_worker.host_device import HostCopy
from headrace_worker.plan import SampledLogprobs, StepResult
from headrace_worker.sampler.logprobs import LogprobsOutput

NOT_FINITE = (
    "The model computed values that are not finite for this request; try float32, or another prompt if it persists."
)


@dataclass(slots=True)
class SampleOutput:
    """Tokens of R rows. Where ``finite`` is False the row's logits were broken and its token means nothing.

    The copy to the host begins here: who reads it later does not wait for steps that were launched in between.
    """

    tokens: Tensor  # [R] int64
    finite: Tensor  # [R] bool
    logprobs: LogprobsOutput | None
    _copy: HostCopy = field(init=False)

    def __post_init__(self) -> None:
        wanted = self.logprobs.tensors if self.logprobs is not None else ()
        self._copy = HostCopy((self.tokens, self.finite, *wanted))

    def to_result(self, step: int) -> StepResult:
        """Everything on the host; waits for this step."""
        tokens, finite, *wanted = self._copy.wait()
        failed = {index: NOT_FINITE for index, good in enumerate(finite.tolist()) if not good}
        logprobs: dict[int, SampledLogprobs] = {}
        if self.logprobs is not None:
            logprobs = {index: entry for index, entry in self.logprobs.read(*wanted).items() if index not in failed}
        return StepResult(step, tokens.tolist(), logprobs, failed)
