"""What steps take of a device's memory besides weights and KV pools: measured before the pools get the rest.

    weights ─▶ pools of a few blocks ─▶ the largest step, with every sampling option ─▶ two recordings ─▶ all released

All ranks of a replica call it together, since steps exchange tensors. On a CPU nothing is measured: a step's memory
comes from what the cache leaves.
"""

import gc
from dataclasses import dataclass

import structlog

from headrace_proto.errors import MemoryTooSmallError
from headrace_proto.quantities import size_text
from headrace_worker.comm.errors import RankLostError
from headrace_worker.core.config import ReplicaConfig
from headrace_worker.device.rank_device import GraphRecorder
from headrace_worker.model.load import LoadedModel
from headrace_worker.ranks.messages import Step
from headrace_worker.ranks.recording import CollectiveRecorder
from headrace_worker.ranks.stage import StageRunner
from headrace_worker.ranks.team import Team
from headrace_worker.runner.coverage import largest_steps
from headrace_worker.runner.graphs import MIXED_TOKENS, decode_sizes, mixed_sizes
from headrace_worker.runner.pools import KVPools
from headrace_worker.runner.runner import Runner
from headrace_worker.runner.warmup import GPU_BUDGET

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes. `libraries`: buffers of NCCL and others, which they keep and which are not free any more."""

    steps: int = 0
    graphs: int = 0
    libraries: int = 0

    def note(self, weights: int, cache: int, left: int) -> str:
        """A sentence for the start: every share of the device's memory."""
        shares = {
            "weights": weights,
            "KV cache": cache,
            "steps": self.steps,
            "recorded steps": self.graphs,
            "libraries": self.libraries,
            "left": left,
        }
        return f"GPU memory: {', '.join(f'{name} {size_text(size)}' for name, size in shares.items())}."


def measure_step_memory(
    config: ReplicaConfig, model: LoadedModel, team: Team | None, recorder: GraphRecorder | None, rows: int, length: int
) -> StepMemory:
    """rows: at most, in one step. length: of the longest request. Raises MemoryTooSmallError, RankLostError."""
    device = model.device
    if not device.asynchronous:
        return StepMemory()
    budget = config.max_num_batched_tokens or GPU_BUDGET
    pools = KVPools.of(model, 1 + len(model.layout.groups))
    before = device.free_memory()
    device.reset_peak()
    runner = Runner(model, pools, max_rows=rows, max_len=length)
    try:
        stage = StageRunner(model, runner, team, "measure") if team is not None else None
        for plan in largest_steps(model.layout, rows, length, budget):
            if stage is not None:
                result = stage.run(Step(plan, []))
                if result.error is not None:
                    raise result.error
            else:
                runner.collect(runner.launch(plan))
        device.synchronize()
        steps = device.peak_bytes()
    except Exception as error:
        if not device.is_out_of_memory(error):
            raise
        raise MemoryTooSmallError(
            f"A step of {budget} tokens does not fit into the GPU memory beside the weights "
            f"({size_text(model.weight_bytes)}): give a smaller --max-num-batched-tokens or --max-num-seqs."
        ) from error
    graphs = 0
    if recorder is not None:
        if team is not None:
            recorder = CollectiveRecorder(recorder, team.new_all_gather("measure graphs"), team.detector)
        graphs = _graph_bytes(runner, recorder)
    if team is not None:
        team.gather_all(0)  # what was sent has arrived
    del runner, stage, pools
    gc.collect()
    device.release_cached()
    return StepMemory(steps, graphs, max(0, before - device.free_memory()))


def _graph_bytes(runner: Runner, recorder: GraphRecorder) -> int:
    """Of all recordings, which share one pool: the largest ones, and what each further one adds. 0 if there is none."""
    decode, mixed = decode_sizes(runner.max_rows), mixed_sizes(MIXED_TOKENS[-1])
    device = runner.device
    device.release_cached()
    free = [device.free_memory()]
    try:
        for of_decode, of_mixed in (([decode[-1]], [mixed[-1]]), ([decode[0]], [])):
            runner.record_sizes(recorder, of_decode, of_mixed)
            device.release_cached()
            free.append(device.free_memory())
    except RankLostError:
        raise
    except Exception as error:  # reported once the steps are recorded for use
        log.info("steps_not_measured", error=type(error).__name__)
        return 0
    largest, one = max(0, free[0] - free[1]), max(0, free[1] - free[2])
    return largest + one * (len(decode) + len(mixed) - 2)
