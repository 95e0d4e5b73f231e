"""Preflight: accepts models that load, with the same sizes; refuses, without weights, models that would not load."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace_proto.errors import HeadraceError, ModelLoadError, ModelUnsupportedError
from headrace_worker.model.footprint import Footprint
from headrace_worker.model.headers import check_length, read_headers
from headrace_worker.model.load import LoadedModel
from headrace_worker.model.preflight import build_without_weights
from headrace_worker.model.source import resolve

FAMILIES = ("llama", "llama-bias", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "granite")
Replica = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path, tiny: Callable[[str], Path], add_tokenizer: Callable[[Path], None]) -> Path:
    """A copy of the tiny llama that may be damaged."""
    add_tokenizer(tiny("llama"))
    return shutil.copytree(tiny("llama"), tmp_path / "model")


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("family", FAMILIES)
def test_models_that_load_are_accepted_with_the_sizes_of_the_loaded_model(
    family: str, tiny: Callable[[str], Path], load_tiny: Callable[..., LoadedModel], replica: Replica
) -> None:
    model = load_tiny(family)
    config = replica(tiny(family), max_model_len=256)
    headers = read_headers(resolve(str(tiny(family))))
    check_length(config, headers)
    assert build_without_weights(config) == Footprint(model.layout, model.weight_bytes, model.facts.max_positions)
    assert headers.elements * 4 <= model.weight_bytes, "a lower bound"


@pytest.mark.parametrize("shape", [{"tp": 2}, {"pp": 3}, {"tp": 4, "pp": 2}])
def test_a_part_is_smaller_than_the_whole(shape: dict[str, int], folder: Path, replica: Replica) -> None:
    whole, part = build_without_weights(replica(folder)), build_without_weights(replica(folder, **shape))
    assert part.weight_bytes < whole.weight_bytes and part.layout.block_bytes < whole.layout.block_bytes


@pytest.mark.parametrize(
    ("fields", "options", "error", "sentence"),
    [
        ({"model_type": "nonsense"}, {}, ModelUnsupportedError, "'nonsense', which transformers"),
        ({"model_type": "mamba", "architectures": []}, {}, HeadraceError, "attention|decoder"),
        ({"num_hidden_layers": 4}, {}, ModelLoadError, "lacks 9 of the model's"),
        ({"intermediate_size": 97}, {}, ModelLoadError, "the config requires"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, {}, ModelUnsupportedError, "quantized"),
        ({}, {"tp": 3}, ModelUnsupportedError, "tp 3 does not fit the 4 attention heads and 2 KV heads"),
        ({}, {"pp": 4}, ModelUnsupportedError, "use --pp 3"),
        ({}, {"tp": 2, "ep": True}, ModelUnsupportedError, "no routed experts"),
        ({}, {"max_model_len": 257}, ModelUnsupportedError, "beyond the 256 positions"),
    ],
)
def test_models_that_would_not_load_are_refused(
    fields: dict[str, Any],
    options: dict[str, Any],
    error: type[Exception],
    sentence: str,
    folder: Path,
    replica: Replica,
) -> None:
    edit_config(folder, **fields)
    with pytest.raises(error, match=sentence):
        build_without_weights(replica(folder, **options))


def test_a_tokenizer_that_cannot_be_read_is_refused(folder: Path, replica: Replica) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="tokenizer"):
        build_without_weights(replica(folder))


def test_random_weights_need_only_a_config(folder: Path, replica: Replica, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert build_without_weights(replica(tmp_path, load_format="dummy")).weight_bytes > 0
