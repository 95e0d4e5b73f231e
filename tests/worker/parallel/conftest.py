"""Sharded replicas inside one process: ranks are threads that exchange tensors at a barrier. No sockets, no processes.

The replicas of `process_ranks.py` run as in production.
"""

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from headrace_proto.block_hash import BlockHasher, derive_key
from headrace_worker.assembly.assemble import Assembly
from headrace_worker.comm.parallel_context import ParallelContext
from headrace_worker.core.config import ReplicaConfig
from headrace_worker.core.engine import Engine
from headrace_worker.core.guide import Mask
from headrace_worker.core.kv.manager import KVManager, ModelScope
from headrace_worker.core.plan import RowSampling, StepPlan, StepResult
from headrace_worker.core.scheduler import Scheduler, SchedulerLimits
from headrace_worker.model.gguf_tokenizer import byte_tokenizer
from headrace_worker.model.load import LoadedModel, load
from headrace_worker.model.surgery import SurgeryPlan
from headrace_worker.offline import Completion, OfflineEngine, Prompt
from headrace_worker.runner import Runner, StepHandle
from headrace_worker.runner.pools import KVPools

sys.path.insert(0, str(Path(__file__).parent))  # helpers of this folder, whatever the import mode
from process_ranks import fork_server, process_replica, rank_group
from router_client import router_client

__all__ = ["fork_server", "process_replica", "rank_group", "router_client"]

TIE = 1e-3
TINY: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 317,  # no multiple of any tp
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts_per_tok": 2, "head_dim": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "llama-bias": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 9, "head_dim": 12},
    "gemma2": {"num_hidden_layers": 4, "head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16},
    "gemma3_text": {"num_hidden_layers": 6, "head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16},
    "granite": {"logits_scaling": 4.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0},
    "phi3": {"sliding_window": None},
    "gpt_neox": {"num_key_value_heads": None},
    "glm4": {"head_dim": 16},
    "cohere2": {"sliding_window": 7, "head_dim": 16},
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 7, **_EXPERTS},
    "mixtral": {"num_local_experts": 4, **_EXPERTS},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, **_EXPERTS},
}


class ThreadGroup:
    """State shared by the ranks of one group."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=30)
        self.slots: list[Tensor] = [torch.empty(0)] * size


class ThreadCommunicator:
    """A communicator between threads of one process."""

    def __init__(self, rank: int, group: ThreadGroup) -> None:
        self.rank, self.size = rank, len(group.slots)
        self._group = group
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self._group.slots[self.rank] = tensor.clone()
        self._group.barrier.wait()
        parts = list(self._group.slots)
        self._group.barrier.wait()
        assert len({part.shape for part in parts}) == 1
        return parts

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.calls.append(("reduce", tuple(tensor.shape)))
        first, *rest = self._exchange(tensor)
        tensor.copy_(first)
        for part in rest:
            tensor.add_(part)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        self.calls.append(("gather", tuple(tensor.shape)))
        return torch.cat(self._exchange(tensor), dim)


@dataclass
class ThreadedRunner:
    """A `StepRunner` over the runners of all ranks: stages run sequentially, the ranks of a stage as threads."""

    stages: list[list[Runner]]
    batches: list[list[Any]] = field(default_factory=list)  # of the last launched step

    def __post_init__(self) -> None:
        self._threads = ThreadPoolExecutor(len(self.stages[0]))

    def launch(self, plan: StepPlan) -> StepHandle:
        batches = self.batches = [[runner.prepare(plan) for runner in stage] for stage in self.stages]
        handle = StepHandle(plan.step)
        if batches[0][0] is None:
            return handle
        received: list[Tensor | None] = [None] * len(self.stages[0])
        for stage, stage_batches in zip(self.stages, batches, strict=True):
            received = list(self._threads.map(Runner.forward, stage, stage_batches, received))
        logits = received[0]
        if logits is None:
            return handle
        for other in received[1:]:
            assert torch.equal(logits, other), "the ranks of a stage computed different logits"
        handle.undrawn = batches[-1][0], logits
        if not plan.guided:
            self.draw(handle, {})
        return handle

    def draw(self, handle: StepHandle, masks: Mapping[int, Mask]) -> None:
        assert handle.undrawn is not None
        handle.samples = samples = self.stages[-1][0].sample(*handle.undrawn, masks)
        for stage, stage_batches in zip(self.stages, self.batches, strict=True):
            for runner, batch in zip(stage, stage_batches, strict=True):
                runner.apply_tokens(batch, samples.tokens)

    def collect(self, handle: StepHandle) -> StepResult:
        return self.stages[0][0].collect(handle)


@dataclass
class ShardedReplica:
    """All ranks of a replica, and an engine over them."""

    models: list[list[LoadedModel]]  # by stage, then tp rank
    runners: list[list[Runner]]
    offline: OfflineEngine

    @property
    def ranks(self) -> list[LoadedModel]:
        return [model for stage in self.models for model in stage]

    def run(
        self, prompts: Sequence[Sequence[int]], count: int, after_step: Callable[[], None] = lambda: None
    ) -> list[Completion]:
        """Greedy tokens; the bookkeeping is checked at every step, and all blocks are released in the end."""
        greedy = RowSampling(temperature=0.0, logprobs=2)
        work = [Prompt(prompt, count, greedy, ignore_eos=True) for prompt in prompts]

        def check() -> None:
            self.offline.assembly.engine.scheduler.check()
            after_step()

        completions = self.offline.generate(work, after_step=check)
        assert [len(completion.token_ids) for completion in completions] == [count] * len(prompts)
        assert self.offline.assembly.kv.pool.used == 0
        return completions


@pytest.fixture(scope="session")
def families() -> dict[str, dict[str, Any]]:
    return FAMILIES


@pytest.fixture(scope="session")
def save_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of a tiny random model, saved by transformers; norms, biases and sinks are not neutral."""
    made: dict[str, Path] = {}

    def save(family: str, **changes: Any) -> Path:
        key = f"{family} {sorted(changes.items())}"
        if key not in made:
            options = FAMILIES.get(family, {}) | changes
            config = AutoConfig.for_model(options.pop("model_type", family), **TINY | options)
            torch.manual_seed(11)
            model = AutoModelForCausalLM.from_config(config).float()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "norm" in name or name.endswith(("bias", "sinks")):
                        parameter.add_(torch.randn_like(parameter) * 0.2)
            made[key] = tmp_path_factory.mktemp(family)
            model.save_pretrained(made[key])
            PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(300)).save_pretrained(made[key])
        return made[key]

    return save


@pytest.fixture(scope="session")
def replica_config() -> Callable[..., ReplicaConfig]:
    """A replica config for a source; float32 on the CPU, one thread."""

    def make(source: object, **options: Any) -> ReplicaConfig:
        fields: dict[str, Any] = {"dtype": "float32", "device": "cpu", "block_size": 4, "cpu_threads": 1}
        fields["replica_id"] = "r"
        return ReplicaConfig(model="m", source=str(source), secret=b"s", **fields | options)

    return make


@pytest.fixture(scope="session")
def load_ranks(replica_config: Callable[..., ReplicaConfig]) -> Callable[..., list[list[LoadedModel]]]:
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
        runners = [
            [Runner(model, KVPools.of(model, num_blocks), max_rows=16, max_len=128) for model in stage]
            for stage in models
        ]
        first = models[0][0]
        limits = SchedulerLimits(16, budget, 1000)
        hasher = BlockHasher(derive_key(b"s"))
        kv = KVManager(first.layout, num_blocks, hasher, ModelScope("m", "r", "float32", "float32"))
        engine = Engine(Scheduler(limits, kv, time.monotonic), ThreadedRunner(runners), time.monotonic)
        offline = OfflineEngine.of(Assembly(engine, first, runners[0][0], None, kv, None, limits, 128))  # type: ignore[arg-type]
        return ShardedReplica(models, runners, offline)

    return make


@pytest.fixture(scope="session")
def plain_model(load_ranks: Callable[..., list[list[LoadedModel]]]) -> Callable[[object], Any]:
    """Plain transformers in float32, with its own attention."""
    made: dict[object, Any] = {}

    def get(source: object) -> Any:
        if source not in made and isinstance(source, Path):
            made[source] = AutoModelForCausalLM.from_pretrained(
                source, dtype=torch.float32, attn_implementation="eager"
            ).eval()
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

    If the two best logits are closer than 1e-3 either is accepted; such ties must be rare.
    """

    def check(source: object, prompts: Sequence[Sequence[int]], completions: Sequence[Completion]) -> None:
        plain = plain_model(source)
        ties = 0
        for prompt, completion in zip(prompts, completions, strict=True):
            assert completion.error == ""
            ids = torch.tensor([[*prompt, *completion.token_ids]])
            with torch.inference_mode():
                logits = plain(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
            logprobs = logits.log_softmax(-1)
            for row, token in enumerate(completion.token_ids):
                best = int(logits[row].argmax())
                if token != best:
                    assert float(logits[row, best] - logits[row, token]) < TIE, f"output {row}: {token}, not {best}"
                    ties += 1
                assert abs(completion.logprobs[row].logprob - float(logprobs[row, token])) < 2e-3
        assert ties <= len(prompts)

    return check
