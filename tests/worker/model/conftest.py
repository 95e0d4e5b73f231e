"""Fixtures of the model and runner tests: tiny saved models, and a driver that builds plans."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace_worker.core.config import ReplicaConfig
from headrace_worker.model.load import LoadedModel, load
from headrace_worker.model.surgery import SurgeryPlan
from headrace_worker.runner import Runner
from headrace_worker.runner.pools import KVPools
from support.worker.runner_driver import Driver
from support.worker.tiny_models import save_tiny


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
def half(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of the same model saved in bfloat16, made once per session."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            whole, folder = tiny(family), tmp_path_factory.mktemp(f"{family}-half")
            AutoModelForCausalLM.from_pretrained(whole, dtype=torch.bfloat16).save_pretrained(folder)
            for file in whole.iterdir():
                if not (folder / file.name).exists() and file.suffix != ".safetensors":
                    shutil.copy(file, folder)
            made[family] = folder
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
        return ReplicaConfig(replica_id="r", model="m", source=str(source), **fields | options)

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


@pytest.fixture(scope="session")
def driver() -> Callable[..., Driver]:
    """A driver with a new runner of a loaded model."""

    def make(model: LoadedModel, num_blocks: int = 400, max_rows: int = 40, max_len: int = 128) -> Driver:
        return Driver(Runner(model, KVPools.of(model, num_blocks), max_rows=max_rows, max_len=max_len))

    return make
