"""Models that would run, but compute something else than their family does, are refused by name."""

from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig

from headrace_base.errors import ModelLoadError, ModelUnsupportedError
from headrace_kernels.meta import AttentionMeta
from headrace_worker.model import refusals
from headrace_worker.model.attention import (
    LayerCache,
    StepContext,
    StepContextError,
    attention_forward,
    step_context,
)
from headrace_worker.model.build_model import build_meta
from headrace_worker.model.cache_layout import cache_layout, layer_windows
from headrace_worker.model.headers import read_headers
from headrace_worker.model.load import LoadedModel, load
from headrace_worker.model.refusals import check_rope
from headrace_worker.model.source import resolve
from support.worker.tiny_models import FAMILIES, TINY, replica_config, save_random

T, H, K, D = 4, 4, 2, 16


def config_of(kind: str, **fields: Any) -> Any:
    config = AutoConfig.for_model(**{"model_type": kind} | TINY | FAMILIES.get(kind, {}))
    for name, value in fields.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", {"is_causal": False}),
        ("gemma2", {"use_bidirectional_attention": True}),
        ("gemma3_text", {"use_bidirectional_attention": True}),
        ("qwen3", {"use_bidirectional_attention": "all"}),
        ("bert", {"is_decoder": False}),
        ("roberta", {"is_decoder": False}),
        ("electra", {"is_decoder": False}),
    ],
)
def test_attention_in_both_directions_is_refused(kind: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ModelUnsupportedError, match=f"{kind} model attends in both directions"):
        build_meta(config_of(kind, **fields), torch.float32)


@pytest.mark.parametrize("kind", ["axial", "ntk", "yarn2"])
@pytest.mark.parametrize("nested", [False, True])
def test_unknown_rotary_embeddings_are_refused(kind: str, nested: bool) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    config = config_of("llama")
    config.rope_parameters = {"full_attention": rope, "sliding_attention": {"rope_type": "default"}} if nested else rope
    with pytest.raises(ModelUnsupportedError, match=f"rotary embeddings of the type '{kind}'"):
        check_rope(config, None)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"num_key_value_heads": [2, 2, 1]}, r"num_key_value_heads of this llama model is \[2, 2, 1\]"),
        ({"head_dim": [16, 16, 32]}, "head_dim of this llama model"),
        ({"num_attention_heads": 2.5}, "num_attention_heads of this llama model is 2.5"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers of this llama model is 1000000000"),
        ({"num_hidden_layers": True}, "num_hidden_layers of this llama model is True"),
        ({"sliding_window": -1}, "sliding_window of this llama model is -1"),
        ({"layer_types": ["full_attention"] * 4}, "has 3 layers, but 4 layer_types"),
        ({"layer_types": ["chunked_attention"] * 3}, "is 'chunked_attention'"),
    ],
)
def test_shapes_per_layer_and_impossible_sizes_are_refused(fields: dict[str, Any], sentence: str) -> None:
    config = AutoConfig.for_model(**{"model_type": "llama"} | TINY)
    config.__dict__.update(fields)
    with pytest.raises(ModelUnsupportedError, match=sentence):
        layer_windows(config)
        cache_layout(config, 16, 4)


def forward(window: int, **arguments: Any) -> torch.Tensor:
    """transformers' call of the attention of a layer whose cache group is for `window` tokens."""
    module = nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    meta = AttentionMeta(
        torch.tensor([0, T], dtype=torch.int32), torch.tensor([T], dtype=torch.int32),
        torch.ones(1, 1, dtype=torch.int32), torch.arange(8, 8 + T), T, T,
    )  # fmt: skip
    query, key = torch.randn(1, H, T, D), torch.randn(1, K, T, D)
    with step_context(StepContext({0: LayerCache.of(0, torch.zeros(2, 2, K, 8, D), window)}, [meta])):
        return attention_forward(module, query, key, key, **{"attention_mask": None} | arguments)[0]


@pytest.mark.parametrize(
    "arguments",
    [
        {"attention_mask": torch.zeros(1, 1, T, T)},
        {"is_causal": False},
        {"position_bias": torch.zeros(H, T, T)},
        {"indices": torch.zeros(1, T, 2)},
        {"block_indices": torch.zeros(1, T, 2)},
        {"cu_seq_lens_q": torch.zeros(2)},
    ],
    ids=lambda value: next(iter(value)),
)
def test_arguments_that_change_attention_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(StepContextError, match=f"passes {next(iter(arguments))}.* not supported"):
        forward(0, **arguments)


@pytest.mark.parametrize(("window", "passed"), [(3, None), (0, 3), (3, 2)])
def test_a_window_that_the_cache_does_not_have_is_refused(window: int, passed: int | None) -> None:
    with pytest.raises(StepContextError, match="but its cache group is for"):
        forward(window, sliding_window=passed)
    assert forward(window, sliding_window=window or None).isfinite().all()


def test_a_mask_of_a_familys_own_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Doge adds a mask that it computes from the values. So does a family that nobody has looked at."""
    monkeypatch.delitem(refusals.UNSERVED, "doge")
    save_random({"model_type": "doge"} | TINY, tmp_path)
    with pytest.raises(StepContextError, match="DogeAttention passes attention_mask"):
        run_once(load(replica_config(tmp_path, load_format="dummy")))


def run_once(model: LoadedModel) -> None:
    layers = {
        layer: LayerCache.of(group.index, torch.zeros(2, 2, group.num_kv_heads, 16, group.head_dim), group.window)
        for group in model.layout.groups
        for layer in group.layers
    }
    meta = AttentionMeta(
        torch.tensor([0, T], dtype=torch.int32), torch.tensor([T], dtype=torch.int32),
        torch.ones(1, 1, dtype=torch.int32), torch.arange(16, 16 + T), T, T,
    )  # fmt: skip
    with torch.no_grad(), step_context(StepContext(layers, [meta] * len(model.layout.groups))):
        model.module(input_ids=torch.arange(T)[None], position_ids=torch.arange(T)[None], use_cache=False)


@pytest.fixture
def mtp_folder(tmp_path: Path) -> Path:
    """A model of a family that declares the tensors of `mtp` as ignored, with such a head in its checkpoint."""
    folder = save_random({"model_type": "ernie4_5_moe", "moe_num_experts": 4, "moe_k": 2} | TINY, tmp_path / "ernie")
    add_tensors(folder, {"mtp.layers.0.proj.weight": torch.ones(500, 500), "mtp.norm.weight": torch.ones(4)})
    return folder


def add_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | tensors, path, metadata={"format": "pt"})


def test_tensors_that_the_family_ignores_do_not_stop_a_load(mtp_folder: Path) -> None:
    model = load(replica_config(mtp_folder))
    names = {name for name, _ in model.module.named_parameters()}
    assert not any("mtp" in name for name in names)
    assert read_headers(resolve(str(mtp_folder))).elements * 4 <= model.weight_bytes, "still a lower bound"


def test_integers_in_place_of_weights_are_refused(tmp_path: Path, tiny: Callable[[str], Path]) -> None:
    folder = copytree(tiny("qwen3"), tmp_path / "model")
    name = "model.layers.0.mlp.up_proj.weight"
    add_tensors(folder, {name: load_file(folder / "model.safetensors")[name].to(torch.int8)})
    with pytest.raises(ModelLoadError, match=r"up_proj.weight' holds torch.int8"):
        load(replica_config(folder))
