"""Assembles an engine: model, KV size, runner, scheduler. No socket and no thread: also usable offline."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from headrace_base.errors import size_text
from headrace_proto.block_hash import BlockHasher
from headrace_worker.assembly.command_queue import CommandQueue
from headrace_worker.assembly.offload import HostSlots, host_slots
from headrace_worker.assembly.step_memory import measure_step_memory
from headrace_worker.assembly.step_thread import ThreadRunner
from headrace_worker.assembly.stepping import choose_depth, choose_recorder, loop_note, record_steps
from headrace_worker.assembly.transfers import open_transfers, to_commands
from headrace_worker.comm.parallel_context import SINGLE
from headrace_worker.core.config import LOCAL_CACHE_KEY, ReplicaConfig
from headrace_worker.core.engine import Engine
from headrace_worker.core.kv.manager import KVManager, ModelScope
from headrace_worker.core.kv.sizing import DEFAULT_MAX_NUM_SEQS, KvSize, request_limit, size_kv
from headrace_worker.core.progress import Progress, ignore_progress
from headrace_worker.core.scheduler import Scheduler, SchedulerLimits
from headrace_worker.core.step_runner import StepRunner
from headrace_worker.core.transfer.orders import TransferReport
from headrace_worker.core.transfer.slots import Slots
from headrace_worker.device.choice import open_device, use_threads
from headrace_worker.device.rank_device import RankDevice
from headrace_worker.kv_transfer.transfer_worker import TransferWorker
from headrace_worker.model.load import LoadedModel, load
from headrace_worker.profiling.profiler import StepProfiler
from headrace_worker.profiling.stepping import ProfiledRunner
from headrace_worker.ranks.loaded_facts import loaded_facts
from headrace_worker.ranks.multi_rank_runner import MultiRankRunner
from headrace_worker.ranks.stage import StageRunner
from headrace_worker.ranks.team import Team
from headrace_worker.runner.pools import KVPools
from headrace_worker.runner.rank_runner import Runner
from headrace_worker.runner.warmup import time_steps, warm_up

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Assembly:
    """A ready engine and what was chosen for it."""

    engine: Engine
    model: LoadedModel
    runner: Runner
    transfers: TransferWorker | None  # None: this engine exchanges no blocks
    kv: KVManager
    size: KvSize
    limits: SchedulerLimits
    max_model_len: int
    commands: CommandQueue  # where transfers report: the loop that drives the engine takes from it
    ranks: MultiRankRunner | None = None  # with several ranks: the runner of all of them
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RankPart:
    """The parts that every rank of a replica has: its part of the model and of the cache."""

    model: LoadedModel
    runner: Runner
    transfers: TransferWorker | None  # None: this engine exchanges no blocks
    size: KvSize
    max_model_len: int
    max_num_seqs: int
    host: HostSlots  # for what is evicted
    files: Slots  # for evicted blocks, on disk
    records: bool  # whether steps may be recorded for replay: the same on all ranks
    notes: list[str]  # sentences for the start


def assemble_part(
    config: ReplicaConfig,
    report_transfer: Callable[[TransferReport], None] | None,
    report: Progress = ignore_progress,
    model: LoadedModel | None = None,
    team: Team | None = None,
    device: RankDevice | None = None,
) -> RankPart:
    """Loads the model (unless it is given) and sizes the cache to what all ranks can hold. Raises a HeadraceError.

    The thread that calls this runs the steps: see `use_threads`. `device`: of the rank, which this thread uses; None:
    that of `config`, for one rank in this process. report_transfer: None if no blocks are exchanged with others.
    """
    use_threads(config.cpu_threads)
    if model is None:
        device = device or open_device(config.device)
        device.use()
        model = load(config, report, parallel=team.context if team is not None else SINGLE, device=device)
    if team is not None:
        team.check_equal(loaded_facts(config, model))
    max_model_len = request_limit(config.max_model_len, model.facts.max_positions)
    max_num_seqs = config.max_num_seqs or DEFAULT_MAX_NUM_SEQS
    report("measuring the memory of steps", 0.0)
    memory = measure_step_memory(
        config, model, team, choose_recorder(config, model.device), max_num_seqs, max_model_len
    )
    report("sizing the KV cache", 0.0)
    # All ranks of a node measure its free memory after all have loaded, and each takes an equal share.
    sharers = team.local_ranks() if team is not None and not model.device.asynchronous else 1
    size = size_kv(
        model.layout,
        device_type=model.device.torch_device.type,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        kv_cache_memory=config.kv_cache_memory,
        state_snapshots=config.state_snapshots,
        reserved=memory.reserved,
        headroom=memory.headroom,
        free=(free := model.device.free_memory()) // sharers,
    )
    if team is not None:
        slots = [number for number in team.gather_all(size.state_slots) if number > 1]  # some ranks may keep no state
        blocks, rows = (min(team.gather_all(number)) for number in (size.num_blocks, size.max_num_seqs))
        size = size.reduced(blocks, rows, min(slots, default=1), model.layout)
    notes = []
    if model.device.asynchronous:
        notes.append(memory.note(model.weight_bytes, size.num_bytes, free))
    if memory.unrecorded:
        notes.append(memory.unrecorded)
    max_num_seqs = size.max_num_seqs
    pools = KVPools.of(model, size.num_blocks, size.state_slots)
    transfers, files, host = None, Slots(0), HostSlots()
    if config.kv_offload_memory:
        host = host_slots(config.kv_offload_memory, model.layout, team)
    if report_transfer is not None:
        opened = open_transfers(config, model, pools, host, team, report_transfer)
        transfers, files = opened.worker, opened.files
        notes.append(opened.note)
        if host.blocks:
            notes.append(host.note(model.layout))
        if files.total:
            size_of = size_text(files.total * model.layout.block_bytes)
            whole, there = (f"{host.tokens(count, model.layout):,}" for count in (files.total, len(files)))
            notes.append(
                f"Evicted KV blocks: {size_of} in {config.kv_offload_dir} for {whole} tokens; {there} are there."
            )
    runner = Runner(
        model, pools, max_rows=max_num_seqs, max_len=max_model_len, kv_listener=transfers,
        max_recorded=memory.max_recorded,
    )  # fmt: skip
    return RankPart(
        model, runner, transfers, size, max_model_len, max_num_seqs, host, files, not memory.unrecorded, notes
    )


def assemble(
    config: ReplicaConfig,
    report: Progress = ignore_progress,
    model: LoadedModel | None = None,
    team: Team | None = None,
    profiler: StepProfiler | None = None,
    cache_key: bytes = LOCAL_CACHE_KEY,
    device: RankDevice | None = None,
    *,
    transfers: bool = False,
) -> Assembly:
    """A whole engine, or rank 0's part of one that also runs the team's other ranks. Raises a HeadraceError.

    `cache_key`: 32 bytes of the block hash. `device`: see `assemble_part`. transfers: exchange blocks with others.
    """
    device = device or (model.device if model is not None else open_device(config.device))
    depth, threaded = choose_depth(config, device)
    thread = ThreadPoolExecutor(1, thread_name_prefix="headrace-device") if threaded else None

    def on_thread(call: Callable[[], Result]) -> Result:
        """On the thread that will run the steps: what loads there computes there, see `use_threads`."""
        return call() if thread is None else thread.submit(call).result()

    commands = CommandQueue()
    given, report_transfer = model, to_commands(commands) if transfers else None
    part = on_thread(lambda: assemble_part(config, report_transfer, report, given, team, device))
    model, runner, size, max_model_len = part.model, part.runner, part.size, part.max_model_len
    ranks = None
    if team is not None:
        team.gather_all(0)  # the pools of all ranks are allocated
        ranks = MultiRankRunner(runner, StageRunner(model, runner, team), team)
    stepper = ranks or runner
    warm = on_thread(lambda: warm_up(stepper, report, config.max_num_batched_tokens))
    notes = record_steps(stepper, choose_recorder(config, device) if part.records else None, report)
    limits = SchedulerLimits(
        part.max_num_seqs,
        warm.max_num_batched_tokens,
        config.max_waiting,
        batches=config.pp,
    )
    kv = KVManager(
        model.layout,
        size.num_blocks,
        BlockHasher(cache_key),
        ModelScope(config.model, model.source.revision, model.arithmetic, model.kv_dtype_name),
        size.state_slots,
        part.max_num_seqs,
    )
    steps: StepRunner = stepper if profiler is None else ProfiledRunner(stepper, profiler)
    if thread is not None:
        steps = ThreadRunner(steps, thread)
    host = part.host if part.transfers is not None else HostSlots()
    engine = Engine(
        Scheduler(limits, kv, time.monotonic),
        steps,
        time.monotonic,
        depth=depth,
        ranks=config.tp * config.pp,
        host_slots=host.blocks,
        host_states=host.states,
        files=part.files,
    )
    # So that routers have a prediction from the first request on; recorded steps are faster than those of the warm-up.
    engine.latency.start(time_steps(stepper) if model.device.asynchronous else warm.steps)
    notes = [*part.notes, *notes, loop_note(depth, config)]
    return Assembly(engine, model, runner, part.transfers, kv, size, limits, max_model_len, commands, ranks, notes)
