"""Step execution on one device: stable rows, gathered inputs, one forward pass, sampled tokens stored in the rows."""

from headrace_worker.runner.rank_runner import Runner, StepHandle
from headrace_worker.runner.warmup import WarmupResult, warm_up

__all__ = ["Runner", "StepHandle", "WarmupResult", "warm_up"]
