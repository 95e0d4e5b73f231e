"""Replicas of several ranks: as threads of this process, without sockets, and as processes, as in production."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace_proto.block_hash import BlockHasher, derive_key
from headrace_worker.accuracy import cache_arguments
from headrace_worker.assembly.assemble import Assembly
from headrace_worker.assembly.command_queue import CommandQueue
from headrace_worker.comm.parallel_context import ParallelContext
from headrace_worker.core.engine import Engine
from headrace_worker.core.kv.manager import KVManager, ModelScope
from headrace_worker.core.request import Finish
from headrace_worker.core.scheduler import Scheduler, SchedulerLimits
from headrace_worker.model.load import LoadedModel, load
from headrace_worker.model.surgery import SurgeryPlan
from headrace_worker.offline import Completion, OfflineEngine, Prompt
from headrace_worker.runner import Runner
from headrace_worker.runner.pools import KVPools
from support.ranks.families import FAMILIES, LLAMA_BLOCK_BYTES, RECURRENT, SMALL, SMALL_POOL_BLOCKS, tiny_options
from support.ranks.process_ranks import ForkServer, ProcessReplica, RankGroup
from support.ranks.router_client import RouterClient
from support.ranks.thread_ranks import ShardedReplica, ThreadCommunicator, ThreadedRunner, ThreadGroup
from support.ranks.workloads import guided_workload, outcome
from support.worker.tiny_models import auto_class, replica_config, save_random

TIE = 1e-3


@pytest.fixture(scope="session")
def save_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of a tiny random model, saved by transformers."""
    made: dict[str, Path] = {}

    def save(family: str, **changes: Any) -> Path:
        key = f"{family} {sorted(changes.items())}"
        if key not in made:
            made[key] = save_random(tiny_options(family) | changes, tmp_path_factory.mktemp(family))
        return made[key]

    return save


@pytest.fixture(scope="session")
def load_ranks() -> Callable[..., list[list[LoadedModel]]]:
    """Every rank's part of a model, by stage and tp rank. Loaded sequentially: loading needs no communication."""

    def make(
        source: object, tp: int, pp: int, ep: bool = False, plan: SurgeryPlan | None = None, **options: Any
    ) -> list[list[LoadedModel]]:
        config = replica_config(source, tp=tp, pp=pp, **options)
        stages = []
        for stage in range(pp):
            group = ThreadGroup(tp)
            contexts = [ParallelContext(ThreadCommunicator(rank, group), stage, pp, ep) for rank in range(tp)]
            stages.append([load(config, plan=plan, parallel=context) for context in contexts])
        return stages

    return make


@pytest.fixture(scope="session")
def sharded(load_ranks: Callable[..., list[list[LoadedModel]]]) -> Callable[..., ShardedReplica]:
    """A replica of tp × pp threads."""

    def make(
        source: object, tp: int = 1, pp: int = 1, *, num_blocks: int = 400, budget: int = 48, **options: Any
    ) -> ShardedReplica:
        models = load_ranks(source, tp, pp, **options)
        slots = 17 if any(model.layout.states for stage in models for model in stage) else 1
        runners = [
            [Runner(model, KVPools.of(model, num_blocks, slots), max_rows=16, max_len=128) for model in stage]
            for stage in models
        ]
        first = models[0][0]
        limits = SchedulerLimits(16, budget, 1000)
        hasher = BlockHasher(derive_key(b"s"))
        kv = KVManager(first.layout, num_blocks, hasher, ModelScope("m", "r", "float32", "float32"), slots)
        engine = Engine(Scheduler(limits, kv, time.monotonic), ThreadedRunner(runners), time.monotonic)
        offline = OfflineEngine(Assembly(engine, first, runners[0][0], None, kv, None, limits, 128, CommandQueue()))  # type: ignore[arg-type]
        return ShardedReplica(models, runners, offline)

    return make


@pytest.fixture(scope="session")
def plain_model(load_ranks: Callable[..., list[list[LoadedModel]]]) -> Callable[[object], Any]:
    """Plain transformers in float32, with its own attention."""
    made: dict[object, Any] = {}

    def get(source: object) -> Any:
        if source not in made and isinstance(source, Path):
            config = AutoConfig.from_pretrained(source)
            made[source] = (
                auto_class(config).from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()
            )
        elif source not in made:
            whole = load_ranks(source, 1, 1, plan=SurgeryPlan.none())[0][0]
            model = AutoModelForCausalLM.from_config(whole.config, attn_implementation="sdpa", dtype=torch.float32)
            model.load_state_dict(whole.module.state_dict(), strict=False)
            model.tie_weights()
            made[source] = model.eval()
        return made[source]

    return get


@pytest.fixture(scope="session")
def check_oracle(plain_model: Callable[[object], Any]) -> Callable[..., None]:
    """Compares completions with plain transformers in float32, teacher-forced: the best token at every position.

    If the two best logits are closer than 1e-3 either is accepted; such ties must be rare. cache: what plain
    transformers attends to, made for each prompt; None: keys and values as they are. bound: of differences where what
    differs by one bit may be rounded to different numbers.
    """

    def check(
        source: object,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Completion],
        cache: Callable[[Any], Any] | None = None,
        bound: float = TIE,
    ) -> None:
        plain = plain_model(source)
        ties = 0
        for prompt, completion in zip(prompts, completions, strict=True):
            assert completion.error == ""
            ids = torch.tensor([[*prompt, *completion.token_ids]])
            with torch.inference_mode():
                kept = {"use_cache": False} if cache is None else cache_arguments(plain, cache(plain.config))
                out = plain(ids, **kept)
            logits = out.logits[0, len(prompt) - 1 : -1].float()
            logprobs = logits.log_softmax(-1)
            for row, token in enumerate(completion.token_ids):
                best = int(logits[row].argmax())
                if token != best:
                    assert float(logits[row, best] - logits[row, token]) < bound, f"output {row}: {token}, not {best}"
                    ties += 1
                assert abs(completion.logprobs[row].logprob - float(logprobs[row, token])) < 2 * bound
        assert ties <= len(prompts)

    return check


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    made = ForkServer({options.get("model_type", name) for name, options in FAMILIES.items()} | RECURRENT.keys())
    yield made
    made.close()


@pytest.fixture
def process_replica(fork_server: ForkServer) -> Callable[..., contextlib.AbstractContextManager[ProcessReplica]]:
    """A context: a replica of tp × pp processes, which must stop in an orderly way."""

    @contextlib.contextmanager
    def make(
        source: object, tp: int, pp: int, record: Mapping[int, Mapping[str, Any]] | None = None, **options: Any
    ) -> Iterator[ProcessReplica]:
        replica = ProcessReplica(replica_config(source, tp=tp, pp=pp, **SMALL | options), fork_server, record)
        yield replica
        replica.close()

    return make


@pytest.fixture
def rank_group(fork_server: ForkServer, save_tiny: Callable[..., Path]) -> Iterator[Callable[..., RankGroup]]:
    """Makes groups of a tiny llama, or another model; remaining processes are killed in the end."""
    made: list[RankGroup] = []

    def make(tp: int, pp: int, source: object = None, **options: Any) -> RankGroup:
        config = replica_config(source or save_tiny("llama"), tp=tp, pp=pp, **SMALL | options)
        made.append(RankGroup(fork_server, config))
        return made[-1]

    yield make
    for group in made:
        group.kill()


@pytest.fixture
def router_client() -> Iterator[RouterClient]:
    made = RouterClient()
    yield made
    made.close()


@pytest.fixture(scope="session")
def on_one_rank(save_tiny: Callable[..., Path]) -> Callable[[Sequence[Prompt]], list[Completion]]:
    """A new replica of one rank with enough memory for all requests."""

    def run(work: Sequence[Prompt]) -> list[Completion]:
        return OfflineEngine(replica_config(save_tiny("llama"), **SMALL)).generate(work)

    return run


@pytest.fixture
def split_replica(save_tiny: Callable[..., Path], process_replica: Callable[..., Any]) -> Callable[[int, int], Any]:
    """A replica with a small pool."""

    def make(tp: int, pp: int, **options: Any) -> Any:
        share = LLAMA_BLOCK_BYTES // tp * (2 if pp == 2 else 3) // 3  # the first of two stages has two of three layers
        return process_replica(save_tiny("llama"), tp, pp, kv_cache_memory=SMALL_POOL_BLOCKS * share, **options)

    return make


@pytest.fixture(scope="session")
def guided_expected(save_tiny: Callable[..., Path]) -> list[Any]:
    """The outcome of `guided_workload(16)` on one rank."""
    config = replica_config(save_tiny("llama"), **SMALL)
    found = outcome(OfflineEngine(config).generate(guided_workload(16)))
    assert [index for index, (_, finish, _) in enumerate(found) if finish is Finish.ERROR] == [2]
    assert {finish for _, finish, _ in found} == {Finish.ERROR, Finish.STOP, Finish.COMPLETE, Finish.LENGTH}
    return found
