"""Tiny checkpoints in the formats of published quantized ones, each beside a dense twin with the same values."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace_kernels.packed import E2M1_NUMBERS

BLOCK = (48, 40)  # neither divides the sizes of the tiny models
GROUP = 16
_AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)  # the output of each nibble of a word
FORMATS: dict[str, dict[str, Any]] = {
    "fp8-block": {"quant_method": "fp8", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic"},
    "fp8-tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    "fbgemm": {"quant_method": "fbgemm_fp8"},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8", "version": "0.29", "kv_cache_quant_algo": "FP8"},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
        },
    },
}
_GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}


def _compressed(format: str, bits: int, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": "int"} | weights}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}


INTEGER_FORMATS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
    "gptq": _GPTQ,
    "gptq-8": _GPTQ | {"bits": 8},
    "gptq-act-order": _GPTQ | {"desc_act": True, "sym": False},
    "gptq-v2": _GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"},
    "int4": _compressed("pack-quantized", 4, group_size=GROUP, strategy="group"),
    "int4-zero": _compressed("pack-quantized", 4, group_size=GROUP, strategy="group", symmetric=False),
    "int8-w8a8": _compressed("int-quantized", 8, strategy="channel"),
}
FLOAT_FORMATS: dict[str, dict[str, Any]] = {
    "mxfp4": _compressed("mxfp4-pack-quantized", 4, type="float", group_size=32, strategy="group"),
    "nvfp4": _compressed("nvfp4-pack-quantized", 4, type="float", group_size=16, strategy="tensor_group"),
    "modelopt-nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
    "mxfp4-experts": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}
GROUPS_OF_32 = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}  # of a model whose matrices have them
_LINEARS = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")


def save_quantized(dense: Path, folder: Path, kind: str) -> Path:
    """Writes `folder`/quantized in a format, and its dense twin in float32; returns the twin. dense: of a model."""
    twin, quantized = folder / "dense", folder / "quantized"
    for target in (twin, quantized):
        shutil.copytree(dense, target, ignore=shutil.ignore_patterns("*.safetensors"))
    values: dict[str, Tensor] = {}
    stored: dict[str, Tensor] = {}
    for name, weight in load_file(dense / "model.safetensors").items():
        if kind == "mxfp4-experts" and name.endswith(("gate_up_proj", "down_proj")):
            values[name], codes, scale = _e2m1(weight.transpose(1, 2), kind)
            values[name] = values[name].transpose(1, 2).contiguous()
            stored[f"{name}_blocks"] = codes.unflatten(-1, (-1, 16)).contiguous()
            stored[f"{name}_scales"] = (scale.log2() + 127).to(torch.uint8)
            continue
        if weight.dim() != 2 or not name.endswith(_LINEARS) or kind == "mxfp4-experts":
            values[name] = stored[name] = weight
            continue
        if kind in FLOAT_FORMATS:
            values[name], parts = _floats(weight, kind)
            stored |= {name.replace("weight", part): tensor.contiguous() for part, tensor in parts.items()}
            continue
        if kind in INTEGER_FORMATS:
            values[name], parts = _integers(weight, kind)
            stored |= {name.replace("weight", part): tensor.contiguous() for part, tensor in parts.items()}
            continue
        scale = _scale(weight, kind)
        spread = _spread(scale, weight)
        codes = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        values[name], stored[name] = codes.float() * spread, codes
        if kind == "fp8-block":
            stored[f"{name}_scale_inv"] = scale
        else:
            stored[f"{name}_scale"] = scale
        if kind in ("fp8-tensor", "modelopt"):
            stored[name.replace("weight", "input_scale")] = torch.ones(())
        if kind == "modelopt" and ".k_proj." in name:
            stored[name.replace("weight", "k_scale")] = torch.ones(())
    save_file({name: value.clone() for name, value in values.items()}, twin / "model.safetensors", {"format": "pt"})
    save_file(stored, quantized / "model.safetensors", {"format": "pt"})
    config = json.loads((dense / "config.json").read_text())
    (quantized / "config.json").write_text(
        json.dumps(config | {"quantization_config": {**FORMATS, **INTEGER_FORMATS, **FLOAT_FORMATS}[kind]})
    )
    return twin


def _scale(weight: Tensor, kind: str) -> Tensor:
    if kind in ("fp8-tensor", "modelopt"):
        return (weight.abs().max() / 448).reshape(() if kind == "fp8-tensor" else (1,))
    if kind != "fp8-block":
        return weight.abs().amax(1, keepdim=True) / 448
    rows, columns = (-(-size // block) for size, block in zip(weight.shape, BLOCK, strict=True))
    scale = torch.zeros(rows, columns)
    for row in range(rows):
        for column in range(columns):
            part = weight[row * BLOCK[0] : (row + 1) * BLOCK[0], column * BLOCK[1] : (column + 1) * BLOCK[1]]
            scale[row, column] = part.abs().max() / 448
    return scale


def _spread(scale: Tensor, weight: Tensor) -> Tensor:
    """One scale for each value."""
    if scale.dim() < 2 or scale.shape == (weight.shape[0], 1):
        return scale.expand(weight.shape)
    whole = scale.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
    return whole[: weight.shape[0], : weight.shape[1]]


def _integers(weight: Tensor, kind: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The values, and the stored tensors by the last part of their names."""
    outputs, inputs = weight.shape
    bits = 8 if "8" in kind else 4
    group = inputs if kind == "int8-w8a8" else GROUP
    index = torch.arange(inputs) // group
    if kind == "gptq-act-order":  # the same for all matrices with the same input
        index = index[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
    grouped = weight[:, index.argsort(stable=True)].view(outputs, -1, group)
    largest = (1 << bits) - 1
    if kind in ("awq", "gptq-act-order", "gptq-v2", "int4-zero"):
        low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        scale = ((high - low) / largest).half().float()
        zero = (-low / scale).round().clamp(1, largest)
    else:
        scale = (grouped.abs().amax(-1) / (largest // 2)).half().float()
        zero = torch.full_like(scale, 1 << bits - 1)
    scale, zero = scale.to(torch.bfloat16).float() if kind.startswith("int") else scale, zero.int()
    codes = ((weight / scale[:, index]).round() + zero[:, index]).clamp(0, largest).int()
    values = (codes - zero[:, index]).float() * scale[:, index]
    if kind == "int8-w8a8":
        return values, {"weight": (codes - 128).to(torch.int8), "weight_scale": scale.to(torch.bfloat16)}
    if kind.startswith("int4"):
        parts = {
            "weight_packed": _words(codes, bits, 1),
            "weight_scale": scale.to(torch.bfloat16),
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        return values, parts | ({"weight_zero_point": _words(zero, bits, 0)} if kind == "int4-zero" else {})
    scales = scale.T.half()
    if kind == "awq":
        order = torch.arange(outputs).view(-1, 8)[:, _AWQ_PLACES].flatten()
        packed, zeros = _words(codes.T[:, order], bits, 1), _words(zero.T[:, order], bits, 1)
        return values, {"qweight": packed, "qzeros": zeros, "scales": scales}
    zeros = _words(zero.T - int(kind != "gptq-v2"), bits, 1)
    parts = {"qweight": _words(codes.T, bits, 0), "qzeros": zeros, "scales": scales, "g_idx": index.int()}
    return values, parts | {"bias": torch.zeros(outputs)}


def _floats(weight: Tensor, kind: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The values in e2m1, and the stored tensors by the last part of their names."""
    of_all = torch.tensor([448 * 6 / float(weight.abs().max())])
    values, codes, scale = _e2m1(weight, kind, of_all)
    if kind == "mxfp4":
        return values, {"weight_packed": codes, "weight_scale": (scale.log2() + 127).to(torch.uint8)}
    if kind == "nvfp4":
        return values, {"weight_packed": codes, "weight_scale": scale, "weight_global_scale": of_all}
    return values, {"weight": codes, "weight_scale": scale, "weight_scale_2": (1 / of_all)[0]}


def _e2m1(weight: Tensor, kind: str, of_all: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The values, two codes in a byte, and the scales of groups of the last dimension, as they are stored."""
    groups = weight.unflatten(-1, (-1, 32 if kind.startswith("mxfp4") else 16))
    largest = groups.abs().amax(-1)
    if of_all is None or kind == "mxfp4":
        stored = factor = torch.exp2((largest / 6).log2().ceil())
    else:
        stored = (largest / 6 * of_all).to(torch.float8_e4m3fn)
        factor = stored.float() / of_all if kind == "nvfp4" else stored.float() * (1 / of_all)
    numbers = torch.tensor(E2M1_NUMBERS)
    codes = (groups[..., None] / factor[..., None, None] - numbers).abs().argmin(-1)
    values = (numbers[codes] * factor[..., None]).flatten(-2)
    pairs = codes.flatten(-2).to(torch.uint8).unflatten(-1, (-1, 2))
    return values, pairs[..., 0] | pairs[..., 1] << 4, stored


def _words(codes: Tensor, bits: int, dim: int) -> Tensor:
    """int32 words of neighbours along `dim`, the first one in the lowest bits."""
    parts = codes.movedim(dim, -1).long().unflatten(-1, (-1, 32 // bits)) << torch.arange(32 // bits) * bits
    return parts.sum(-1).to(torch.int32).movedim(-1, dim)
