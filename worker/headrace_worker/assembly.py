"""Puts an engine together: model, KV size, runner, scheduler. No socket and no thread: usable offline as it is."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from headrace_proto.block_hash import BlockHasher, derive_key
from headrace_proto.errors import ModelUnsupportedError
from headrace_worker.config import ReplicaConfig
from headrace_worker.engine import Engine, StepRunner
from headrace_worker.kv.manager import KVManager, ModelScope
from headrace_worker.model.device import use_device
from headrace_worker.model.kv_shards import kv_shards
from headrace_worker.model.load import LoadedModel, load
from headrace_worker.parallel.context import SINGLE
from headrace_worker.parallel.runner import MultiRankRunner
from headrace_worker.parallel.stage import StageRunner
from headrace_worker.parallel.team import Team
from headrace_worker.profiling.profiler import StepProfiler
from headrace_worker.profiling.stepping import ProfiledRunner
from headrace_worker.runner.activations import step_bytes
from headrace_worker.runner.graphs import MIXED_TOKENS, Recorder
from headrace_worker.runner.runner import Runner
from headrace_worker.runner.sizing import KvSize, free_memory, size_kv
from headrace_worker.runner.warmup import GPU_BUDGET, warm_up
from headrace_worker.scheduler import Scheduler, SchedulerLimits
from headrace_worker.step_thread import StepThread
from headrace_worker.stepping import choose_depth, choose_recorder, loop_note, record_steps
from headrace_worker.transfer.courier import Courier

DEFAULT_MAX_NUM_SEQS = 256

Report = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Assembly:
    """A ready engine and what was chosen for it."""

    engine: Engine
    model: LoadedModel
    runner: Runner
    kv: KVManager
    size: KvSize
    limits: SchedulerLimits
    max_model_len: int
    ranks: MultiRankRunner | None = None  # with several ranks: what runs them all
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RankPart:
    """What every rank of a replica makes alike: its part of the model and of the cache."""

    model: LoadedModel
    runner: Runner
    size: KvSize
    max_model_len: int
    max_num_seqs: int


def assemble_part(
    config: ReplicaConfig,
    report: Report = lambda stage, fraction: None,
    model: LoadedModel | None = None,
    team: Team | None = None,
) -> RankPart:
    """Loads (unless a loaded model is given) and sizes, as large as all ranks can. Raises a HeadraceError."""
    if team is not None:
        use_device(team.device)
    model = model or load(config, report, parallel=team.context if team is not None else SINGLE)
    max_model_len = _max_model_len(config, model)
    max_num_seqs = config.max_num_seqs or DEFAULT_MAX_NUM_SEQS
    report("sizing the KV cache", 0.0)
    free = None
    if team is not None and model.device.type == "cpu":
        # Everybody measures the same memory once all have loaded, and nobody takes what is meant for a neighbour.
        sharers = team.local_ranks()
        free = free_memory(model.device) // sharers
    size = size_kv(
        model.layout,
        device=model.device,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        kv_cache_memory=config.kv_cache_memory,
        activation_bytes=_beside_cache(config, model, max_num_seqs) if model.device.type == "cuda" else 0,
        free=free,
    )
    if team is not None:
        size = size.reduced(min(team.agree(size.num_blocks)), model.layout)
    runner = Runner(model, num_blocks=size.num_blocks, max_rows=max_num_seqs, max_len=max_model_len)
    shards = kv_shards(model.config, model.dtype_name, config.block_size, config.tp, config.pp)
    runner.courier = Courier(team.topology.rank if team is not None else 0, config.host, shards, runner.caches)
    return RankPart(model, runner, size, max_model_len, max_num_seqs)


def assemble(
    config: ReplicaConfig,
    report: Report = lambda stage, fraction: None,
    model: LoadedModel | None = None,
    team: Team | None = None,
    profiler: StepProfiler | None = None,
    recorder: Recorder | None = None,
) -> Assembly:
    """A whole engine, or rank 0's part of one with the team's other ranks behind it. Raises a HeadraceError.

    `recorder`: what records steps for replay, instead of what the device has for it.
    """
    part = assemble_part(config, report, model, team)
    model, runner, size, max_model_len = part.model, part.runner, part.size, part.max_model_len
    ranks = None
    if team is not None:
        team.agree(0)  # everybody's pools are made
        ranks = MultiRankRunner(runner, StageRunner.of(model, runner, team), team)
    stepper = ranks or runner
    warm = warm_up(stepper, report, config.max_num_batched_tokens)
    notes = record_steps(config, stepper, recorder or choose_recorder(config, model.device), report)
    limits = SchedulerLimits(
        part.max_num_seqs,
        warm.max_num_batched_tokens,
        config.max_waiting,
        batches=config.pp,
    )
    kv = KVManager(
        model.layout,
        size.num_blocks,
        BlockHasher(derive_key(config.secret)),
        ModelScope(config.model, model.source.revision, model.dtype_name, model.dtype_name),
    )
    depth, threaded = choose_depth(config, model.device)
    steps: StepRunner = stepper if profiler is None else ProfiledRunner(stepper, profiler)
    if threaded:
        steps = StepThread(steps, lambda: torch.set_num_threads(model.threads))
    engine = Engine(
        Scheduler(limits, kv, time.monotonic), steps, time.monotonic, depth=depth, ranks=config.tp * config.pp
    )
    for prefill, decoding, kv_tokens, seconds in warm.steps:  # so that routers can predict from the first request on
        engine.latency.observe(prefill, decoding, kv_tokens, seconds)
    return Assembly(engine, model, runner, kv, size, limits, max_model_len, ranks, [*notes, loop_note(depth, config)])


def _beside_cache(config: ReplicaConfig, model: LoadedModel, rows: int) -> int:
    """Bytes that steps take on a GPU beside weights and cache: the largest one, and those that are recorded."""
    sizes = {"vocab_size": model.vocab_size, "element_bytes": model.dtype.itemsize, "tp": config.tp}
    largest = step_bytes(model.config, tokens=config.max_num_batched_tokens or GPU_BUDGET, rows=rows, **sizes)
    return largest + step_bytes(model.config, tokens=max(rows, MIXED_TOKENS[-1]), rows=0, **sizes)


def _max_model_len(config: ReplicaConfig, model: LoadedModel) -> int:
    longest = model.facts.max_positions
    wanted = config.max_model_len or longest
    if wanted > longest:
        raise ModelUnsupportedError(
            f"--max-model-len {wanted} is beyond the {longest} positions that the model was made for: give at most that"
        )
    return wanted
