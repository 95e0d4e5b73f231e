"""Changes from outside: they are applied where expected, and change no result."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from headrace_kernels.packed import Form
from headrace_worker.comm.parallel_context import ParallelContext, SingleRank
from headrace_worker.model.cache_layout import cache_layout, layer_windows
from headrace_worker.model.load import LoadedModel, load
from headrace_worker.model.packable import PackedLinear
from headrace_worker.model.surgery.experts import FusedExperts, FusedRouter
from headrace_worker.model.surgery.mlp import fuse_mlp
from headrace_worker.model.surgery.norms import fuse_norm
from support.ranks.families import tiny_options
from support.worker.tiny_models import replica_config, save_random

FUSED: dict[str, dict[str, int]] = {  # modules of each kind that replace the original ones
    "llama": {"FusedAttention": 3, "FusedMlp": 3, "FusedLayer": 3, "FusedRmsNorm": 7},
    "llama-bias": {"FusedAttention": 3, "FusedMlp": 3, "FusedLayer": 3, "FusedRmsNorm": 7},
    "qwen2": {"FusedAttention": 3, "FusedMlp": 3, "FusedLayer": 3, "FusedRmsNorm": 7},
    "qwen3": {"FusedAttention": 3, "FusedMlp": 3, "FusedLayer": 3, "FusedRmsNorm": 13},
    "mistral": {"FusedAttention": 3, "FusedMlp": 3, "FusedLayer": 3, "FusedRmsNorm": 7},
    "gemma2": {"FusedAttention": 4, "FusedMlp": 4, "FusedLayer": 4, "FusedRmsNorm": 17},
    "gemma3_text": {"FusedAttention": 6, "FusedMlp": 6, "FusedLayer": 6},
    "phi3": {"FusedAttention": 3, "FusedMlp": 3, "FusedLayer": 3, "FusedRmsNorm": 7},
    "qwen3_5_text": {"FusedAttention": 1, "FusedDeltaNet": 3, "FusedMlp": 4, "FusedLayer": 1, "FusedRmsNorm": 11},
    "qwen3_next": {
        **{"FusedAttention": 1, "FusedDeltaNet": 3, "FusedMlp": 20, "FusedLayer": 1, "FusedRmsNorm": 11},
        **{"FusedExperts": 4, "FusedRouter": 4, "FusedSharedMoe": 4},
    },
    "granite": {"FusedAttention": 3, "FusedMlp": 3, "FusedLayer": 3, "FusedRmsNorm": 7},
    "granitemoehybrid": {"FusedAttention": 1, "FusedRmsNorm": 7, "FusedGatedNorm": 2},
    "bamba": {"FusedAttention": 1, "FusedMlp": 3, "FusedRmsNorm": 7, "FusedGatedNorm": 2},
    "falcon_h1": {"FusedAttention": 3, "FusedMlp": 3, "FusedRmsNorm": 7, "FusedGatedNorm": 3},
}


@pytest.mark.parametrize("family", FUSED)
def test_fused_where_the_structure_is_known(family: str, load_tiny: Callable[..., LoadedModel]) -> None:
    kinds = [type(module).__name__ for module in load_tiny(family).module.modules()]
    assert {name: kinds.count(name) for name in FUSED[family]} == FUSED[family]
    # A linear that stays plain was missed.
    assert "Linear" not in kinds


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_have_the_same_bits_in_any_batch(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Those of a checkpoint in bfloat16 stay so."""
    folder = save_random(tiny_options(family), tmp_path)
    if dtype is not torch.float32:
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).save_pretrained(folder)
    model = load(replica_config(folder)).module
    found = [module for module in model.modules() if isinstance(module, FusedExperts | FusedRouter)]
    assert len(found) == 6
    products = [module for one in found for module in one.modules() if isinstance(module, PackedLinear)]
    wanted = Form.FLOAT32 if dtype is torch.float32 else Form.BFLOAT16
    assert len(products) == 3 * (2 * 4 + 1) and {product.packed.form for product in products} == {wanted}
    x = torch.randn(1, 23, 48)
    for block in [module for module in model.modules() if type(module).__name__.endswith("SparseMoeBlock")]:
        whole = block(x)
        for size in (1, 4, 9):
            assert torch.equal(torch.cat([block(part) for part in x.split(size, 1)], 1), whole)


def test_no_weight_is_kept_twice(load_tiny: Callable[..., LoadedModel]) -> None:
    model = load_tiny("qwen2")
    held = {tensor.data_ptr(): tensor.nbytes for tensor in [*model.module.parameters(), *model.module.buffers()]}
    packed = sum(held.values())
    rotary = sum(b.nbytes for n, b in model.module.named_buffers() if "inv_freq" in n)
    assert packed - rotary <= model.weight_bytes * 1.01


@pytest.mark.parametrize(
    "norm",
    [
        BambaRMSNormGated(36, group_size=12),
        BambaRMSNormGated(36, group_size=36),
        FalconH1RMSNormGated(36, n_groups=3, norm_before_gate=True),
        FalconH1RMSNormGated(36, n_groups=2, norm_before_gate=False),
        Qwen3NextRMSNormGated(36),
    ],
    ids=lambda norm: f"{type(norm).__name__}",
)
@torch.no_grad()
def test_norms_with_a_gate(norm: nn.Module) -> None:
    torch.manual_seed(3)
    nn.init.normal_(norm.get_parameter("weight"))
    fused = fuse_norm(norm)
    x, gate = torch.randn(1, 7, 36), torch.randn(1, 7, 40)[..., :36]
    assert fused is not None
    torch.testing.assert_close(fused(x, gate), norm(x, gate))
    assert torch.equal(fused(x[:, 3:4], gate[:, 3:4]), fused(x, gate)[:, 3:4])


def test_similar_modules_with_other_results_stay_unchanged() -> None:
    class ShiftedRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states) + 0.01

    class ClampedMlp(LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).clamp(-1e-3, 1e-3)

    assert fuse_norm(ShiftedRMSNorm(16)) is None
    assert fuse_norm(LlamaRMSNorm(16)) is not None
    assert fuse_norm(nn.LayerNorm(16)) is None

    class Config:
        hidden_size, intermediate_size, mlp_bias, hidden_act = 16, 32, False, "silu"

    with torch.no_grad():
        assert fuse_mlp(ClampedMlp(Config()), True) is None
        assert fuse_mlp(LlamaMLP(Config()), True) is not None


class LayoutConfig:
    """The fields of a config that the layout reads."""

    model_type = "test"
    hidden_size, num_attention_heads, num_key_value_heads = 64, 4, 2

    def __init__(self, layers: int, **fields: Any) -> None:
        self.num_hidden_layers = layers
        for name, value in fields.items():
            setattr(self, name, value)


def test_layout_splits_groups_to_one_size() -> None:
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 2
    layout = cache_layout(LayoutConfig(12, layer_types=kinds, sliding_window=8), 4, 4)
    assert {len(group.layers) for group in layout.groups} == {2}
    assert [group.window for group in layout.groups] == [0, 8, 8, 8, 8, 8]
    assert sorted(layer for group in layout.groups for layer in group.layers) == list(range(12))
    assert [group.index for group in layout.groups] == list(range(6))
    assert layout.groups[0].layers == (5, 11)


def test_windows_without_layer_types() -> None:
    assert layer_windows(LayoutConfig(2, sliding_window=7)) == [7, 7]
    assert layer_windows(LayoutConfig(2, sliding_window=7, use_sliding_window=False)) == [0, 0]
    assert layer_windows(LayoutConfig(2, sliding_window=None)) == [0, 0]


@pytest.mark.parametrize(
    ("pattern", "stages"),
    [
        ("F" * 30, 4),  # 8 + 8 + 7 + 7
        ("SSSSSF" * 5, 2),
        ("SF" * 13, 4),
        ("SSSSSF", 2),
    ],
)
def test_layout_of_stages_has_the_same_groups_everywhere(pattern: str, stages: int) -> None:
    kinds = ["full_attention" if letter == "F" else "sliding_attention" for letter in pattern]
    config = LayoutConfig(len(kinds), layer_types=kinds, sliding_window=8)
    ranks = [cache_layout(config, 4, 4, ParallelContext(SingleRank(), stage, stages)) for stage in range(stages)]
    assert len({tuple(group.window for group in rank.groups) for rank in ranks}) == 1
    layers = [layer for rank in ranks for group in rank.groups for layer in group.layers]
    assert sorted(layers) == list(range(len(kinds)))
    for rank in ranks:
        for group in rank.groups:
            assert all((kinds[layer] == "full_attention") == (group.window == 0) for layer in group.layers)
    # A token's memory on the fullest stage: close to its share of the whole.
    fullest = max(rank.slots * len(rank.groups) for rank in ranks)
    assert fullest <= 1.5 * -(-len(kinds) // stages) + 1
