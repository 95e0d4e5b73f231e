"""Ranks with parts of layers with recurrent state, of every kind, compute the logits of plain transformers."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from headrace_base.errors import ModelUnsupportedError
from headrace_worker.comm.parallel_context import SINGLE, ParallelContext
from headrace_worker.model.attention import StepContext, step_context
from headrace_worker.model.sharding.recurrent import is_recurrent, recurrent_rule
from headrace_worker.model.sharding.shard import shard
from headrace_worker.model.weights import cut_tensor
from support.ranks.families import TINY
from support.ranks.thread_ranks import ThreadCommunicator, ThreadGroup

_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 12, "mamba_d_state": 8, "mamba_chunk_size": 4, "mamba_conv_bias": True}
_EXPERTS = {"num_experts_per_tok": 2, "num_experts": 4}
KINDS: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA2, "attn_layer_indices": [1], "mamba_n_groups": 1},
    "granitemoehybrid": {
        **_MAMBA2,
        "mamba_n_groups": 2,
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "shared_intermediate_size": 32,
        "layer_types": ["mamba", "attention", "mamba"],
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "n_groups": 4,
        "ssm_state_size": 8,
        "chunk_size": 4,
        "head_dim": 12,
    },
    "jamba": {**_EXPERTS, "attn_layer_offset": 1, "attn_layer_period": 3, "mamba_d_state": 8, "mamba_dt_rank": 3},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False, "conv_bias": True},
    "lfm2_moe": {
        **_EXPERTS,
        "layer_types": ["conv", "full_attention", "conv"],
        "moe_intermediate_size": 32,
        "num_dense_layers": 1,
    },
}


def tiny_model(family: str, **changes: Any) -> Any:
    """Of plain transformers, without redirected functions."""
    config = AutoConfig.for_model(**{"model_type": family} | TINY | KINDS[family] | changes)
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def rank_part(whole: Any, parallel: ParallelContext) -> Any:
    """The model of one rank, with its part of the weights of the whole one."""
    with torch.device("meta"):
        part = AutoModelForCausalLM.from_config(whole.config, attn_implementation="eager")
    sharding = shard(part, parallel, torch.device("cpu"))
    values = dict([*whole.named_parameters(remove_duplicate=False), *whole.named_buffers()])
    for name, own in [*part.named_parameters(remove_duplicate=False), *part.named_buffers()]:
        tensor = cut_tensor(values[name], sharding.cuts.get(name, ()))
        assert tensor.shape == own.shape, name
        owner, _, leaf = name.rpartition(".")
        module = part.get_submodule(owner)
        entries = module._parameters if leaf in module._parameters else module._buffers
        entries[leaf] = torch.zeros_like(tensor) if name in sharding.zeros else tensor
    sharding.connect(part)
    return part.eval()


def logits(model: Any, context: StepContext | None = None) -> torch.Tensor:
    with torch.inference_mode(), step_context(context or StepContext({}, [])):
        found: torch.Tensor = model(torch.arange(3, 14)[None], use_cache=False).logits
        return found


def check_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("family", "ranks"),
    [("bamba", 2), ("granitemoehybrid", 4), ("nemotron_h", 2), ("jamba", 2), ("lfm2", 2), ("lfm2_moe", 4)],
)
def test_ranks_compute_what_the_whole_model_computes(family: str, ranks: int) -> None:
    """With B and C of a group on one, two or four ranks; all layers of the model."""
    whole, group = tiny_model(family), ThreadGroup(ranks)
    assert any(map(is_recurrent, whole.modules()))
    contexts = [ParallelContext(ThreadCommunicator(rank, group), 0, 1) for rank in range(ranks)]
    parts = [rank_part(whole, context) for context in contexts]
    assert all(part.num_parameters() < 0.6 * whole.num_parameters() for part in parts), "something is not cut"
    with ThreadPoolExecutor(ranks) as threads:
        for found in threads.map(logits, parts):
            check_equal(found, logits(whole))


@pytest.mark.parametrize(
    "family", sorted(KINDS.keys() - {"bamba"})
)  # its layers return a pair, which has no placeholder
def test_stages_compute_what_the_whole_model_computes(family: str) -> None:
    whole = tiny_model(family)
    stages = [rank_part(whole, ParallelContext(SINGLE.tp, stage, 2)) for stage in range(2)]
    first = StepContext({}, [])
    logits(stages[0], first)
    assert first.hidden_out is not None
    check_equal(logits(stages[1], StepContext({}, [], hidden_in=first.hidden_out)), logits(whole))


class Unknown(nn.Module):
    """A layer with a tensor that no rule names."""

    def __init__(self, **linears: nn.Module) -> None:
        super().__init__()
        self.layer_idx = 0
        self.in_proj, self.out_proj = nn.Linear(8, 24), nn.Linear(8, 8)
        self.conv = nn.Conv1d(8, 8, 3, groups=8)
        for name, linear in linears.items():
            self.add_module(name, linear)


def test_a_layer_that_no_rule_covers_is_refused() -> None:
    layer = Unknown()
    assert is_recurrent(layer) and recurrent_rule(layer, "x").unit == "channels"
    with pytest.raises(ModelUnsupportedError, match="x keeps recurrent state, which is not sharded yet"):
        recurrent_rule(Unknown(gate_proj=nn.Linear(8, 8)), "x")
    del layer.conv
    layer.local = nn.Conv1d(8, 8, 3, groups=8)
    with pytest.raises(ModelUnsupportedError, match="not sharded yet"):
        recurrent_rule(layer, "x")


def test_stages_of_other_layers_are_refused() -> None:
    with pytest.raises(
        ModelUnsupportedError, match=r"bamba cannot be split into pipeline stages: serve it with --pp 1\."
    ):
        rank_part(tiny_model("bamba"), ParallelContext(SINGLE.tp, 0, 2))


def test_groups_that_ranks_cannot_share_are_refused() -> None:
    whole = tiny_model("bamba", mamba_n_heads=12, mamba_d_head=8, mamba_n_groups=4, num_attention_heads=6)
    with pytest.raises(ModelUnsupportedError, match="tp 6 does not divide the 4 groups of heads"):
        rank_part(whole, ParallelContext(ThreadCommunicator(0, ThreadGroup(6)), 0, 1))
