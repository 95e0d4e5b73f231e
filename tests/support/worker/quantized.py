"""Tiny checkpoints in the formats of published quantized ones, each beside a dense twin with the same values."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

BLOCK = (48, 40)  # neither divides the sizes of the tiny models
FORMATS: dict[str, dict[str, Any]] = {
    "fp8-block": {"quant_method": "fp8", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic"},
    "fp8-tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    "fbgemm": {"quant_method": "fbgemm_fp8"},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
        },
    },
}


def save_quantized(dense: Path, folder: Path, kind: str) -> Path:
    """Writes `folder`/quantized in a format, and its dense twin in float32; returns the twin. dense: of a model."""
    twin, quantized = folder / "dense", folder / "quantized"
    for target in (twin, quantized):
        shutil.copytree(dense, target, ignore=shutil.ignore_patterns("*.safetensors"))
    values: dict[str, Tensor] = {}
    stored: dict[str, Tensor] = {}
    for name, weight in load_file(dense / "model.safetensors").items():
        if weight.dim() != 2 or not name.endswith("_proj.weight"):
            values[name] = stored[name] = weight
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
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": FORMATS[kind]}))
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
