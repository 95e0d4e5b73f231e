"""Step execution on one device: stable rows, gathered inputs, one forward pass, sampled tokens back into the rows."""

from headrace_worker.runner.runner import Runner, StepHandle
from headrace_worker.runner.sizing import KvSize, size_kv
from headrace_worker.runner.warmup import WarmupResult, warm_up

__all__ = ["KvSize", "Runner", "StepHandle", "WarmupResult", "size_kv", "warm_up"]
