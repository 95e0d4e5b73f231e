"""How steps run: one at a time or one ahead, kernel by kernel or replayed."""

import structlog

from headrace_worker.comm.errors import RankLostError
from headrace_worker.core.config import ReplicaConfig
from headrace_worker.core.progress import Progress
from headrace_worker.core.step_runner import RunnerBrokenError
from headrace_worker.device.loss import loss_sentence
from headrace_worker.device.rank_device import GraphRecorder, RankDevice
from headrace_worker.ranks.recording import RecordingFailedError
from headrace_worker.runner.model_runner import ModelRunner

log = structlog.get_logger(__name__)


def choose_depth(config: ReplicaConfig, device: RankDevice) -> tuple[int, bool]:
    """How many steps are in flight when the next is planned, and whether steps need a `ThreadRunner`.

    Pipeline stages are in flight anyway. A GPU runs asynchronously. On a CPU host and device share the cores, and a
    step that is planned ahead computes one token too many at the end of each answer: only on request.
    """
    if config.pp > 1:
        return config.pp - 1, False
    if config.async_scheduling == "off" or (config.async_scheduling == "auto" and not device.asynchronous):
        return 0, False
    return 1, not device.asynchronous


def loop_note(depth: int, config: ReplicaConfig) -> str:
    """A sentence for the start-up notes."""
    if config.pp > 1:
        return f"Steps: {config.pp} batches of requests in flight, one per pipeline stage."
    if depth:
        return "Steps: the next one is planned and launched while one runs."
    return "Steps: one at a time (--async-scheduling on plans the next one while one runs)."


def choose_recorder(config: ReplicaConfig, device: RankDevice) -> GraphRecorder | None:
    """The device's recorder of steps, the same on every rank; None if it cannot or must not record.

    Ranks on GPUs communicate through NCCL, with `--deterministic` too, and NCCL can be recorded. On CPUs there is
    nothing to record: a step is launched by running it.
    """
    return device.recorder() if config.cuda_graphs != "off" else None


def unrecorded_note(error: Exception, device: RankDevice, remedy: str) -> str:
    """A sentence for the start: why steps are not recorded. `remedy`: the option to reduce if memory is short.

    Only recording shows whether a model's code waits for the device, as that of routed experts may. Raises
    RunnerBrokenError, RankLostError if the error is one of them, or has ended the device.
    """
    if isinstance(error, RunnerBrokenError | RankLostError):
        raise error
    if isinstance(error, RecordingFailedError):
        log.warning("steps_not_recorded", error=str(error))
        return f"CUDA graphs: off, as {error}."
    if device.is_out_of_memory(error):
        log.warning("steps_not_recorded", error="out of memory")
        return f"CUDA graphs: off, as there is too little memory for them: give a smaller {remedy}."
    if loss := loss_sentence(device, error):
        raise RunnerBrokenError(loss) from error
    log.warning("steps_not_recorded", error=f"{type(error).__name__}: {error}".splitlines()[0][:200])
    return f"CUDA graphs: off, as this model's code cannot be recorded ({type(error).__name__})."


def record_steps(runner: ModelRunner, recorder: GraphRecorder | None, report: Progress) -> list[str]:
    """Records steps for replay where that is possible; returns sentences for the start-up notes.

    Raises RunnerBrokenError when a rank or the device was lost meanwhile.
    """
    if recorder is None:
        return []
    try:
        decode, mixed = runner.record(recorder, lambda done: report("recording steps", done))
        runner.clear(1)
    except Exception as error:
        return [unrecorded_note(error, runner.device, "--kv-cache-memory")]
    return [
        f"CUDA graphs: {len(decode)} sizes of decode steps up to {decode[-1]}, mixed ones up to {mixed[-1]} tokens."
    ]
