"""How steps are run: one at a time or one ahead, kernel by kernel or replayed."""

from collections.abc import Callable

import structlog
import torch

from headrace_worker.config import ReplicaConfig
from headrace_worker.runner.graphs import MIXED_TOKENS, CudaRecorder
from headrace_worker.runner.runner import Runner

log = structlog.get_logger(__name__)

Report = Callable[[str, float], None]


def choose_depth(config: ReplicaConfig, device: torch.device) -> tuple[int, bool]:
    """How many steps are in flight when the next is planned, and whether it takes a thread of ours to run them.

    Stages of a pipeline are in flight anyway. A GPU runs behind the host by itself. On a CPU host and device share the
    cores, and a step that is planned ahead computes one token too many at the end of each answer: only when asked for.
    """
    if config.pp > 1:
        return config.pp - 1, False
    if config.async_scheduling == "off" or (config.async_scheduling == "auto" and device.type == "cpu"):
        return 0, False
    return 1, device.type == "cpu"


def loop_note(depth: int, config: ReplicaConfig) -> str:
    """A sentence for the start-up notes."""
    if config.pp > 1:
        return f"Steps: {config.pp} batches of requests in flight, one per pipeline stage."
    if depth:
        return "Steps: the next one is planned and launched while one runs."
    return "Steps: one at a time (--async-scheduling on plans the next one while one runs)."


def record_steps(config: ReplicaConfig, runner: Runner, report: Report) -> list[str]:
    """Records steps for replay where that is possible; sentences for the start-up notes."""
    if runner.device.type != "cuda" or config.cuda_graphs == "off":
        return []
    try:  # pragma: no cover - needs a GPU
        decode, mixed = runner.record(
            CudaRecorder(runner.device), MIXED_TOKENS[-1], lambda done: report("recording steps", done)
        )
        runner.clear(1)
    except Exception as error:  # code of the model that waits for the device cannot be recorded
        log.warning("steps_not_recorded", error=str(error).splitlines()[0][:200])
        return [f"CUDA graphs: off, as this model's code cannot be recorded ({type(error).__name__})."]
    return [
        f"CUDA graphs: {len(decode)} sizes of decode steps up to {decode[-1]}, mixed ones up to {mixed[-1]} tokens."
    ]
