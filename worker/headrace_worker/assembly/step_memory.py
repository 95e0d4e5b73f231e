"""What steps take of a device's memory besides weights and KV pools: measured before the pools get the rest.

    weights ─▶ pools of a few blocks ─▶ the largest steps, with every sampling option ─▶ which sizes of steps are worth
    recording ─▶ some recordings ─▶ all released

All ranks of a replica call it together, since steps exchange tensors. On a CPU nothing is measured: a step's memory
comes from what the cache leaves.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from headrace_base.errors import HeadraceError, MemoryTooSmallError, size_text
from headrace_worker.assembly.stepping import unrecorded_note
from headrace_worker.core.config import ReplicaConfig
from headrace_worker.core.kv.sizing import HEADROOM_REASON, gpu_headroom
from headrace_worker.core.plan import StepPlan
from headrace_worker.device.rank_device import GraphRecorder
from headrace_worker.model.load import LoadedModel
from headrace_worker.ranks.messages import Step
from headrace_worker.ranks.recording import CollectiveRecorder
from headrace_worker.ranks.stage import StageRunner
from headrace_worker.ranks.team import Team
from headrace_worker.runner.coverage import largest_steps, prompt_step
from headrace_worker.runner.graphs import MIXED_TOKENS, largest_that_pays
from headrace_worker.runner.pools import KVPools
from headrace_worker.runner.rank_runner import Runner
from headrace_worker.runner.warmup import GPU_BUDGET

FURTHER_SIZES = 4  # recorded to measure what each one adds: a few, as the memory of one may come in larger pieces


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes. `libraries`: buffers of NCCL and others, which they keep and which are not free any more.

    `headroom`: what a cache of no given size leaves besides. `unrecorded`: a sentence for the start, if steps cannot be
    recorded on any rank. `max_recorded`: tokens of the largest step worth recording, the same on all ranks.
    """

    steps: int = 0
    graphs: int = 0
    libraries: int = 0
    headroom: int = 0
    unrecorded: str = ""
    max_recorded: int = MIXED_TOKENS[-1]

    @property
    def reserved(self) -> int:
        """Bytes that are free and will be used."""
        return self.steps + self.graphs

    def note(self, weights: int, cache: int, free: int) -> str:
        """A sentence for the start: every share of the device's memory. `free`: bytes before the cache is allocated."""
        left = free - self.reserved - cache
        headroom = max(0, min(self.headroom, left))
        shares = {
            "weights": weights,
            "KV cache": cache,
            "steps": self.steps,
            "recorded steps": self.graphs,
            "libraries": self.libraries,
            f"headroom ({HEADROOM_REASON})": headroom,
            "left": left - headroom,
        }
        return f"GPU memory: {', '.join(f'{name} {size_text(size)}' for name, size in shares.items())}."


def measure_step_memory(
    config: ReplicaConfig, model: LoadedModel, team: Team | None, recorder: GraphRecorder | None, rows: int, length: int
) -> StepMemory:
    """rows: at most, in one step. length: of the longest request.

    Raises MemoryTooSmallError, RankLostError, RunnerBrokenError.
    """
    device = model.device
    if not device.asynchronous:
        return StepMemory()
    budget = config.max_num_batched_tokens or GPU_BUDGET
    device.release_cached()
    before = device.free_memory()
    pools = KVPools.of(model, 1 + len(model.layout.groups))
    device.reset_peak()
    runner = Runner(model, pools, max_rows=rows, max_len=length)
    try:
        stage = StageRunner(model, runner, team, "measure") if team is not None else None
        run = partial(_run, runner, stage)
        for plan in largest_steps(model.layout, rows, length, budget):
            run(plan)
        device.synchronize()
        steps = device.peak_bytes()
        if recorder is not None:
            most = min(budget, rows * (length - 2))
            runner.max_recorded = largest_that_pays(partial(_launch_share, run, runner, team), most)
    except Exception as error:
        if device.is_out_of_memory(error):
            raise MemoryTooSmallError(
                f"A step of {budget} tokens does not fit into the GPU memory beside the weights "
                f"({size_text(model.weight_bytes)}): give a smaller --max-num-batched-tokens or --max-num-seqs."
            ) from error
        if not isinstance(error, HeadraceError):
            runner.check_device(error)
        raise
    graphs, unrecorded = 0, ""
    if recorder is not None:
        if team is not None:
            recorder = CollectiveRecorder(recorder, team.new_all_gather("measure graphs"), team.detector, device)
        try:
            graphs = _graph_bytes(runner, recorder)
        except Exception as error:
            # Memory is short although there is no cache yet, so a smaller one would not help.
            unrecorded = unrecorded_note(error, device, "--max-num-seqs or --max-model-len")
    if team is not None:
        team.gather_all(0)  # no rank releases what it measured before all have measured
    largest = runner.max_recorded
    del runner, stage, pools, run
    gc.collect()
    device.release_cached()
    libraries = max(0, before - device.free_memory())
    return StepMemory(steps, graphs, libraries, gpu_headroom(device.total_memory()), unrecorded, largest)


def _run(runner: Runner, stage: StageRunner | None, plan: StepPlan) -> None:
    """Launches a step, on this rank. Raises what the model or the sampler raises."""
    if stage is None:
        runner.launch(plan)
    elif (error := stage.run(Step(plan, [])).error) is not None:
        raise error


def _launch_share(run: Callable[[StepPlan], None], runner: Runner, team: Team | None, tokens: int) -> float:
    """Share of a step's time that passes until the step is launched: the largest of all ranks.

    tokens: number in the step. The step runs twice; the second run counts.
    """
    plan = prompt_step(runner.layout, tokens, runner.max_len)
    launched = ended = 0.0
    for _ in range(2):
        began = time.perf_counter()
        run(plan)
        launched = time.perf_counter() - began
        runner.device.synchronize()
        ended = time.perf_counter() - began
    share = launched / ended
    return share if team is None else max(team.gather_all(round(1e9 * share))) / 1e9  # which gathers integers


def _graph_bytes(runner: Runner, recorder: GraphRecorder) -> int:
    """Bytes of all recordings, which share one pool: all inputs and outputs, the largest ones, and what others add.

    Raises whatever the recorder or the model raises when it cannot be recorded.
    """
    device = runner.device
    decode, mixed = (
        [size for size in runner.recorded_sizes if size.of_decode is of_decode] for of_decode in (True, False)
    )
    others = decode[1:] + mixed[1:]
    further = others[:: -(-len(others) // FURTHER_SIZES)]

    def free() -> int:
        device.release_cached()
        return device.free_memory()

    before = free()
    graphs = runner.new_graphs(recorder)  # all of its recordings live until the last measurement
    graphs.record([decode[0], mixed[0]])
    largest = free()
    graphs.record(further)
    each = -(-max(0, largest - free()) // len(further))
    return max(0, before - largest) + each * len(others)
