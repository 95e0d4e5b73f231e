"""Fixtures of the model and runner tests: tiny saved models, and a driver that builds plans."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace_worker.core.config import ReplicaConfig
from headrace_worker.core.plan import RowInit, RowSampling, StepPlan, StepResult, TableUpdate, Work
from headrace_worker.model.load import LoadedModel, load
from headrace_worker.model.surgery import SurgeryPlan
from headrace_worker.runner import Runner
from headrace_worker.runner.pools import KVPools

sys.path.insert(0, str(Path(__file__).parent))  # helpers of this folder, whatever the import mode

TINY: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "llama-bias": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 9, "head_dim": 12},
    "mistral-full": {"model_type": "mistral", "sliding_window": None, "head_dim": 12},
    "gemma2": {"num_hidden_layers": 4, "head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16},
    "gemma3_text": {"num_hidden_layers": 6, "head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16},
    "phi3": {"sliding_window": None},
    "granite": {"logits_scaling": 4.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0},
}


def save_tiny(family: str, folder: Path) -> Path:
    """Save a tiny random model of a family with transformers; norms are not all ones."""
    options = dict(FAMILIES[family])
    config = AutoConfig.for_model(options.pop("model_type", family), **TINY | options)
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a tiny saved model of a family, made once per session."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = save_tiny(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


@pytest.fixture(scope="session")
def replica() -> Callable[..., ReplicaConfig]:
    """A replica config for a source; float32 on the CPU.


    Tiny models use one thread: on a busy machine two threads wait for each other longer than they compute.
    """

    def make(source: object, **options: Any) -> ReplicaConfig:
        threads = None if source == "smollm2" else 1
        fields: dict[str, Any] = {"dtype": "float32", "device": "cpu", "block_size": 4, "cpu_threads": threads}
        return ReplicaConfig(replica_id="r", model="m", source=str(source), secret=b"s", **fields | options)

    return make


@pytest.fixture(scope="session")
def load_tiny(
    tiny: Callable[[str], Path], replica: Callable[..., ReplicaConfig], add_tokenizer: Callable[[Path], None]
) -> Callable[..., LoadedModel]:
    """A tiny model of a family, loaded by Headrace."""

    def get(family: str, plan: SurgeryPlan | None = None, **options: Any) -> LoadedModel:
        folder = tiny(family)
        add_tokenizer(folder)
        return load(replica(folder, **options), plan=plan)

    return get


@pytest.fixture(scope="session")
def add_tokenizer() -> Callable[[Path], None]:
    """Put a byte-level tokenizer into a model folder."""
    from transformers import PreTrainedTokenizerFast

    from headrace_worker.model.gguf_tokenizer import byte_tokenizer

    def add(folder: Path) -> None:
        if not (folder / "tokenizer.json").exists():
            backend = byte_tokenizer(300)
            PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)

    return add


@pytest.fixture(scope="session")
def oracle() -> Callable[[Path, list[int], int], list[int]]:
    """Greedy tokens of plain transformers in float32, with its own cache and attention."""
    models: dict[Path, Any] = {}

    def generate(folder: Path, prompt: list[int], count: int) -> list[int]:
        if folder not in models:
            models[folder] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = models[folder].generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=count,
                max_new_tokens=count,
                eos_token_id=None,
            )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens

    return generate


@dataclass
class Driver:
    """Builds plans for a runner: rows in any order, blocks scattered over the pool."""

    runner: Runner
    tokens: dict[int, list[int]] = field(default_factory=dict)
    computed: dict[int, int] = field(default_factory=dict)
    tables: dict[int, int] = field(default_factory=dict)
    steps: int = 0
    generation: int = 0

    def __post_init__(self) -> None:
        # Odd blocks backwards, then even ones: adjacent blocks of a table are never adjacent in the pool.
        count = self.runner.num_blocks
        self.free = [*range(2, count, 2), *range(1, count, 2)]

    def init(self, row: int, prompt: list[int], sampling: RowSampling | None = None) -> RowInit:
        self.generation += 1
        self.tokens[row] = list(prompt)
        self.computed[row] = 0
        self.tables[row] = 0
        return RowInit(row, self.generation, list(prompt), len(prompt), sampling or RowSampling(temperature=0.0))

    def grow(self, row: int, end: int) -> list[TableUpdate]:
        needed = -(-end // self.runner.layout.block_size) - self.tables[row]
        if needed <= 0:
            return []
        first = self.tables[row]
        self.tables[row] += needed
        return [
            TableUpdate(group.index, row, first, [self.free.pop() for _ in range(needed)])
            for group in self.runner.layout.groups
        ]

    def step(
        self, chunks: dict[int, int], inits: list[RowInit] | None = None, frees: list[int] | None = None
    ) -> StepResult:
        """Compute up to `chunks[row]` tokens of each row; a row whose known tokens are all computed samples one."""
        work, updates = [], []
        for row, most in chunks.items():
            start = self.computed[row]
            count = min(most, len(self.tokens[row]) - start)
            draws = start + count == len(self.tokens[row])
            updates += self.grow(row, start + count)
            work.append(Work(row, start, count, draws))
            self.computed[row] = start + count
        self.steps += 1
        plan = StepPlan(self.steps, frees or [], inits or [], updates, work)
        result = self.runner.collect(self.runner.launch(plan))
        drawing = [item.row for item in work if item.sample]
        assert len(result.tokens) == len(drawing)
        for row, token in zip(drawing, result.tokens, strict=True):
            self.tokens[row].append(token)
        return result

    def generate(self, prompts: dict[int, list[int]], count: int, chunk: int = 10_000) -> dict[int, list[int]]:
        """Run all prompts together until each has `count` new tokens; a chunk is computed per row and step."""
        inits = [self.init(row, prompt) for row, prompt in prompts.items()]
        while chunks := {row: chunk for row in prompts if len(self.tokens[row]) < len(prompts[row]) + count}:
            self.step(chunks, inits)
            inits = []
        return {row: self.tokens[row][len(prompt) :] for row, prompt in prompts.items()}


@pytest.fixture(scope="session")
def driver() -> Callable[..., Driver]:
    """A driver with a new runner of a loaded model."""

    def make(model: LoadedModel, num_blocks: int = 400, max_rows: int = 40, max_len: int = 128) -> Driver:
        return Driver(Runner(model, KVPools.of(model, num_blocks), max_rows=max_rows, max_len=max_len))

    return make
