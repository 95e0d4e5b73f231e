"""Fixtures of the model and runner tests: tiny saved models."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace_worker.model.load import LoadedModel, load
from headrace_worker.model.surgery import SurgeryPlan
from support.worker.tiny_models import replica_config, save_tiny


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
            whole, made[family] = tiny(family), tmp_path_factory.mktemp(f"{family}-half")
            shutil.copytree(whole, made[family], dirs_exist_ok=True)
            AutoModelForCausalLM.from_pretrained(whole, dtype=torch.bfloat16).save_pretrained(made[family])
        return made[family]

    return get


@pytest.fixture(scope="session")
def load_tiny(tiny: Callable[[str], Path]) -> Callable[..., LoadedModel]:
    """A tiny model of a family, loaded by Headrace."""

    def get(family: str, plan: SurgeryPlan | None = None, **options: Any) -> LoadedModel:
        return load(replica_config(tiny(family), **options), plan=plan)

    return get
