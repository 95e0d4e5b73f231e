"""How steps are run: one at a time or one ahead, kernel by kernel or replayed."""

from collections.abc import Callable
from typing import Protocol

import structlog
import torch

from headrace_worker.config import ReplicaConfig
from headrace_worker.engine import RunnerBrokenError
from headrace_worker.parallel.recording import RecordingFailedError
from headrace_worker.runner.graphs import MIXED_TOKENS, CudaRecorder, Recorder

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


class Recordable(Protocol):
    """A runner of one rank, or what stands for those of all ranks."""

    def record(
        self, recorder: Recorder, max_tokens: int, done: Callable[[float], None]
    ) -> tuple[list[int], list[int]]: ...

    def clear(self, blocks: int, rows: int = 1) -> None: ...


def choose_recorder(config: ReplicaConfig, device: torch.device) -> Recorder | None:
    """How this device records steps, the same on every rank; None where it cannot or shall not.

    Ranks on GPUs talk through NCCL, with `--deterministic` too, and NCCL can be recorded. Between CPUs there is nothing
    to record: a step is launched by running it.
    """
    if device.type != "cuda" or config.cuda_graphs == "off":
        return None
    return CudaRecorder(device)  # pragma: no cover - needs a GPU


def record_steps(config: ReplicaConfig, runner: Recordable, recorder: Recorder | None, report: Report) -> list[str]:
    """Records steps for replay where that is possible; sentences for the start-up notes.

    Whether a model's code waits for the device, as that of routed experts may, is found out by recording it. Raises
    RunnerBrokenError when the ranks lost each other meanwhile.
    """
    if recorder is None:
        return []
    if config.pp > 1:  # hidden states come and go between what could be recorded
        return ["CUDA graphs: off, as steps are recorded only where one stage has all layers (--pp 1)."]
    try:
        decode, mixed = runner.record(recorder, MIXED_TOKENS[-1], lambda done: report("recording steps", done))
        runner.clear(1)
    except RunnerBrokenError:
        raise
    except RecordingFailedError as error:
        log.warning("steps_not_recorded", error=str(error))
        return [f"CUDA graphs: off, as {error}."]
    except Exception as error:  # code of the model that waits for the device cannot be recorded
        log.warning("steps_not_recorded", error=f"{type(error).__name__}: {error}".splitlines()[0][:200])
        return [f"CUDA graphs: off, as this model's code cannot be recorded ({type(error).__name__})."]
    return [
        f"CUDA graphs: {len(decode)} sizes of decode steps up to {decode[-1]}, mixed ones up to {mixed[-1]} tokens."
    ]
