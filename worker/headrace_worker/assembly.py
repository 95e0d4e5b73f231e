"""Puts an engine together: model, KV size, runner, scheduler. No socket and no thread: usable offline as it is."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from headrace_proto.block_hash import BlockHasher, derive_key
from headrace_proto.errors import ModelUnsupportedError
from headrace_worker.config import ReplicaConfig
from headrace_worker.engine import Engine
from headrace_worker.kv.manager import KVManager, ModelScope
from headrace_worker.model.load import LoadedModel, load
from headrace_worker.runner.runner import Runner
from headrace_worker.runner.sizing import KvSize, size_kv
from headrace_worker.runner.warmup import warm_up
from headrace_worker.scheduler import Scheduler, SchedulerLimits

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


def assemble(
    config: ReplicaConfig, report: Report = lambda stage, fraction: None, model: LoadedModel | None = None
) -> Assembly:
    """Loads (unless a loaded model is given), sizes and warms up. Raises a HeadraceError with a sentence."""
    model = model or load(config, report)
    max_model_len = _max_model_len(config, model)
    max_num_seqs = config.max_num_seqs or DEFAULT_MAX_NUM_SEQS
    report("sizing the KV cache", 0.0)
    size = size_kv(
        model.layout,
        device=model.device,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        kv_cache_memory=config.kv_cache_memory,
    )
    runner = Runner(model, num_blocks=size.num_blocks, max_rows=max_num_seqs, max_len=max_model_len)
    warm = warm_up(runner, report)
    limits = SchedulerLimits(
        max_num_seqs, config.max_num_batched_tokens or warm.max_num_batched_tokens, config.max_waiting
    )
    kv = KVManager(
        model.layout,
        size.num_blocks,
        BlockHasher(derive_key(config.secret)),
        ModelScope(config.model, model.source.revision, model.dtype_name, model.dtype_name),
    )
    engine = Engine(Scheduler(limits, kv, time.monotonic), runner, time.monotonic)
    return Assembly(engine, model, runner, kv, size, limits, max_model_len)


def _max_model_len(config: ReplicaConfig, model: LoadedModel) -> int:
    longest = model.facts.max_positions
    wanted = config.max_model_len or longest
    if wanted > longest:
        raise ModelUnsupportedError(
            f"--max-model-len {wanted} is beyond the {longest} positions that the model was made for: give at most that"
        )
    return wanted
