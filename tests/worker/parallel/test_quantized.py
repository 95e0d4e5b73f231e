"""Quantized checkpoints generate the tokens of plain transformers on their dense twins, whole and split."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from headrace_kernels.gpu import weight_only
from headrace_kernels.packed import Codes, Form
from headrace_kernels.rounded import Products
from headrace_worker.model.packable import PackedLinear
from headrace_worker.model.surgery import SurgeryPlan
from headrace_worker.model.surgery.experts import ExpertsOnGpu
from headrace_worker.model.surgery.scaled import ScaledLinear, WeightOnlyLinear
from support.ranks.workloads import prompts
from support.worker import quantized
from support.worker.quantized import FORMATS, GROUPS_OF_32, INTEGER_FORMATS, save_quantized


@pytest.mark.parametrize(
    ("family", "kind", "tp", "pp", "ep"),
    [
        *(("llama", kind, 1, 1, False) for kind in FORMATS),
        ("llama", "fp8-block", 2, 2, False),
        ("qwen3_moe", "fp8-block", 1, 1, False),
        ("qwen3_moe", "fp8-block", 2, 2, False),
        ("qwen3_moe", "fp8-block", 2, 1, True),
        ("qwen3_moe", "compressed-tensors", 2, 1, False),
        ("deepseek_v3", "fp8-block", 2, 1, False),
        *(("llama", kind, 1, 1, False) for kind in INTEGER_FORMATS),
        ("llama", "awq", 2, 2, False),
        ("llama", "gptq-act-order", 2, 1, False),
        ("llama", "int4-zero", 2, 1, False),
        ("qwen3_moe", "awq", 2, 1, True),
        ("qwen3_moe", "int4", 2, 1, False),
        ("mixtral", "gptq", 2, 1, True),
        ("mixtral", "fp8-tensor", 1, 2, False),
        *(("llama", kind, 1, 1, False) for kind in ("mxfp4", "nvfp4", "modelopt-nvfp4")),
        ("llama", "mxfp4", 2, 2, False),
        ("qwen3_moe", "nvfp4", 2, 1, False),
        ("qwen3_moe", "modelopt-nvfp4", 1, 1, False),
        ("gpt_oss", "mxfp4-experts", 1, 1, False),
        ("gpt_oss", "mxfp4-experts", 2, 2, False),
        ("gpt_oss", "mxfp4-experts", 2, 1, True),
    ],
)
def test_tokens(
    family: str,
    kind: str,
    tp: int,
    pp: int,
    ep: bool,
    save_tiny: Callable[..., Path],
    sharded: Callable[..., Any],
    check_oracle: Callable[..., None],
    tmp_path: Path,
) -> None:
    folder = save_tiny(family, **GROUPS_OF_32) if kind.startswith("mxfp4") else save_tiny(family)
    twin = save_quantized(folder, tmp_path, kind)
    replica = sharded(tmp_path / "quantized", tp, pp, **{"ep": True} if ep else {})
    mixed = prompts(5)
    check_oracle(twin, mixed, replica.run(mixed, 6))


@pytest.mark.parametrize(
    ("family", "kind", "changes", "tp", "shares"),
    [
        ("llama", "int4", {"intermediate_size": 112}, 2, [64, 48]),
        ("llama", "fp8-block", {"intermediate_size": 120}, 2, [80, 40]),
        ("llama", "int8-w8a8", {"intermediate_size": 96}, 2, [48, 48]),
        ("mixtral", "awq", {"intermediate_size": 112}, 2, [64, 48]),
        ("gpt_oss", "mxfp4-experts", {"intermediate_size": 96, "hidden_size": 64, "head_dim": 16}, 2, [64, 32]),
    ],
)
def test_shares_of_whole_groups(
    family: str,
    kind: str,
    changes: dict[str, int],
    tp: int,
    shares: list[int],
    save_tiny: Callable[..., Path],
    sharded: Callable[..., Any],
    check_oracle: Callable[..., None],
    tmp_path: Path,
) -> None:
    """Ranks have more and fewer of an MLP's inner dimensions, and none of its matrices is dequantized."""
    twin = save_quantized(save_tiny(family, **changes), tmp_path, kind)
    replica = sharded(tmp_path / "quantized", tp)
    mixed = prompts(5)
    check_oracle(twin, mixed, replica.run(mixed, 6))
    for rank, share in zip(replica.models[0], shares, strict=True):
        linears = {name: part for name, part in rank.module.named_modules() if isinstance(part, PackedLinear)}
        downs = [part.packed for name, part in linears.items() if re.search(r"\bmlp\b.*\b(?:down_proj|w2)\b", name)]
        assert downs and {down.inputs for down in downs} == {share}
        assert all(down.form >= Form.CODES8 for down in downs)


def test_tokens_of_rounded_inputs(
    save_tiny: Callable[..., Path],
    sharded: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on GPUs that multiply 8-bit numbers: ranks with whole blocks have the scales of one rank."""
    monkeypatch.setattr(quantized, "BLOCK", (128, 128))
    monkeypatch.setitem(FORMATS["fp8-block"], "weight_block_size", [128, 128])
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
    save_quantized(save_tiny("llama", **sizes), tmp_path, "fp8-block")
    plan = SurgeryPlan(products=Products(outputs=True, blocks=True))
    mixed = prompts(5)
    one, ranks = (sharded(tmp_path / "quantized", count, plan=plan) for count in (1, 2))
    linears = [part for part in ranks.models[0][-1].module.modules() if isinstance(part, ScaledLinear)]
    assert len(linears) == 3 * 4 and linears[-1].scaled.codes.shape == (256, 256)
    found, expected = ([done.token_ids for done in each.run(mixed, 6)] for each in (ranks, one))
    assert found == expected


def _values(codes: Codes, _bits: int, dtype: torch.dtype, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Stands in for weights in humming's order."""
    if codes.codes.dim() == 2:
        return codes.dense().to(dtype), bias
    parts = [
        replace(codes, codes=codes.codes[i], scale=codes.scale[i], minimum=None if minimum is None else minimum[i])
        for minimum in (codes.minimum,)
        for i in range(len(codes.codes))
    ]
    return torch.stack([part.dense().to(dtype) for part in parts]), bias


def _matmul(x: Tensor, weight: tuple[Tensor, Tensor | None], offsets: Tensor | None = None) -> Tensor:
    values, bias = weight
    if offsets is None:
        return functional.linear(x, values, bias)
    out = x.new_full((len(x), values.shape[1]), float("nan"))
    for i, value in enumerate(values):
        rows = slice(int(offsets[i]), int(offsets[i + 1]))
        out[rows] = functional.linear(x[rows], value, None if bias is None else bias[i])
    return out


@pytest.mark.parametrize(
    ("family", "kind", "layout", "linears", "experts"),
    [
        *(("llama", kind, {}, 12, 0) for kind in ("awq", "gptq-act-order", "int8-w8a8", "nvfp4", "fp8-block")),
        ("qwen3_moe", "int4-zero", {}, 6, 3),
        ("qwen3_moe", "fp8-block", {"tp": 2}, 6, 3),
        ("mixtral", "nvfp4", {"tp": 2, "ep": True}, 6, 3),
        ("gpt_oss", "mxfp4-experts", {}, 0, 3),
        ("gpt_oss", "mxfp4-experts", {"tp": 2, "ep": True}, 0, 3),
    ],
)
def test_tokens_of_few_bits(
    family: str,
    kind: str,
    layout: dict[str, Any],
    linears: int,
    experts: int,
    save_tiny: Callable[..., Path],
    sharded: Callable[..., Any],
    check_oracle: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU, with the products that humming-kernels makes there made by torch."""
    monkeypatch.setattr(weight_only, "few_bits", _values)
    monkeypatch.setattr(weight_only, "matmul", _matmul)
    monkeypatch.setattr(quantized, "BLOCK", (64, 64))
    monkeypatch.setitem(FORMATS["fp8-block"], "weight_block_size", [64, 64])
    twin = save_quantized(save_tiny(family, **GROUPS_OF_32), tmp_path, kind)
    replica = sharded(tmp_path / "quantized", plan=SurgeryPlan(few_bits=True), **layout)
    parts = list(replica.models[0][0].module.modules())
    assert sum(isinstance(part, WeightOnlyLinear) for part in parts) == linears
    assert sum(isinstance(part, ExpertsOnGpu) for part in parts) == experts
    mixed = prompts(5)
    check_oracle(twin, mixed, replica.run(mixed, 6))
