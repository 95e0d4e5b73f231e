"""Models that cannot be split are refused at load, by name, with a remedy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from headrace_base.errors import ModelLoadError, ModelUnsupportedError


@pytest.mark.parametrize(
    ("family", "changes", "split", "sentence"),
    [
        ("llama", {}, (3, 1), r"tp 3 does not fit the 4 attention heads and 2 KV heads .* use --tp 1, 2 or 4"),
        (
            "llama",
            {"num_key_value_heads": 1},
            (3, 1),
            r"tp 3 does not fit the 4 attention heads and 1 KV heads .* use --tp 1, 2 or 4",
        ),
        ("llama", {}, (8, 1), r"tp 8 does not fit the 4 attention heads and 2 KV heads .* use --tp 1, 2 or 4"),
        ("llama", {"intermediate_size": 90}, (4, 1), r"tp 4 does not divide the 90 outputs of gate_proj"),
        ("phi3", {"intermediate_size": 90}, (4, 1), r"tp 4 does not divide the 90 inner dimensions of an MLP"),
        ("mixtral", {"intermediate_size": 90}, (4, 1), r"tp 4 does not divide the 90 inner dimensions of an expert"),
        ("qwen3_next", {"linear_num_key_heads": 1}, (2, 1), r"tp 2 does not divide the 1 key heads of this model"),
        ("llama", {}, (1, 4), r"pp 4 is more than the 3 layers .* --pp 3"),
        ("olmo2", {}, (2, 1), r"olmo2 splits layers\.\*\.self_attn\.q_proj as 'colwise_gather_output'.* --tp 1"),
        ("bitnet", {}, (2, 1), r"bitnet has no tensor-parallel plan"),
        (
            "glm_moe_dsa",
            {"indexer_types": ["full", "full", "shared"]},
            (1, 2),
            r"Layer 2 .* an earlier layer selects, .*: --pp 2 does not fit",
        ),
        ("hy_v4", {}, (1, 2), r"hy_v4 cannot be split into pipeline stages: .* --pp 1"),
        ("nanochat", {}, (1, 2), r"nanochat cannot be split into pipeline stages: .* --pp 1"),
        ("granitemoe", {"num_local_experts": 4}, (2, 1), r"granitemoe does not split its attention: .* --tp 1"),
    ],
)
def test_refused(
    family: str,
    changes: dict[str, Any],
    split: tuple[int, int],
    sentence: str,
    save_tiny: Callable[..., Path],
    load_ranks: Callable[..., Any],
) -> None:
    with pytest.raises(ModelUnsupportedError, match=sentence):
        load_ranks(save_tiny(family, **changes), *split)


def test_experts(save_tiny: Callable[..., Path], load_ranks: Callable[..., Any]) -> None:
    with pytest.raises(ModelUnsupportedError, match="llama has no routed experts: serve it without --ep"):
        load_ranks(save_tiny("llama"), 2, 1, ep=True)
    folder = save_tiny("mixtral", num_local_experts=3)
    with pytest.raises(ModelUnsupportedError, match="tp 2 does not divide the 3 experts"):
        load_ranks(folder, 2, 1, ep=True)


def test_a_missing_expert_is_named(
    save_tiny: Callable[..., Path], load_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    folder = save_tiny("mixtral")
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(next(folder.glob("*.safetensors")))
    removed = next(name for name in tensors if "layers.1" in name and ".experts.2." in name)
    save_file({name: tensor for name, tensor in tensors.items() if name != removed}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"lacks experts of 'model\.layers\.1\.mlp\.experts"):
        load_ranks(tmp_path, 2, 1)
