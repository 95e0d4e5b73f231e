"""`quantization_config` of a checkpoint: which formats are read, and what the tensors do not show. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headrace_proto.errors import ModelUnsupportedError
from headrace_worker.model.gguf_config import GGUF_FAMILIES
from headrace_worker.model.json_files import read_object

_FIELD = "quantization_config"
_OLD_FIELD = "compression_config"  # of compressed-tensors
_OLD_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")  # of modelopt, GPTQ and AWQ
_LARGEST_BLOCK = 1 << 16
SERVED = ("fp8", "fbgemm_fp8", "compressed-tensors (float-quantized)", "modelopt (FP8)")


class QuantizationScheme(NamedTuple):
    """How quantized matrices are stored: e4m3 with scales."""

    method: str  # in quantization_config
    block: tuple[int, int] | None = None  # outputs and inputs of one scale; None: one per output, or one for all


def with_quantization(folder: Path, fields: dict[str, Any], model: str) -> dict[str, Any]:
    """The fields of config.json, with what older checkpoints keep elsewhere as quantization_config."""
    if _FIELD in fields:
        return fields
    if isinstance(old := fields.get(_OLD_FIELD), dict):
        return fields | {_FIELD: {"quant_method": "compressed-tensors"} | old}
    for name in _OLD_FILES:
        if (folder / name).is_file():
            found = read_object(folder / name, model)
            method = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq"}.get(name, "awq")
            inner = found.get("quantization") if method == "modelopt" else found
            return fields | {_FIELD: {"quant_method": method} | (inner if isinstance(inner, dict) else {})}
    return fields


def read_scheme(family: str, quantization: Any) -> QuantizationScheme | None:
    """Of the value of quantization_config; None without one. Raises ModelUnsupportedError for a format not served."""
    if not quantization:
        return None
    fields = quantization if isinstance(quantization, Mapping) else {}
    method = fields.get("quant_method", "unknown")
    reader = _READERS.get(method) if isinstance(method, str) else None
    scheme = reader(fields) if reader is not None else None
    if scheme is None:
        other = " or a GGUF" if family in GGUF_FAMILIES else ""
        what = method if reader is None else f"{method} ({_kind(fields)})"
        raise ModelUnsupportedError(
            f"The checkpoint is quantized by {str(what)[:80]}, which is not served ({', '.join(SERVED)} are): give one "
            f"of these, unquantized safetensors{other}."
        )
    return scheme


def _read_fp8(fields: Mapping[str, Any]) -> QuantizationScheme | None:
    if fields.get("fmt", "e4m3") != "e4m3":
        return None
    return QuantizationScheme("fp8", _block(fields.get("weight_block_size")))


def _read_per_output(fields: Mapping[str, Any]) -> QuantizationScheme:
    return QuantizationScheme(fields["quant_method"])


def _read_modelopt(fields: Mapping[str, Any]) -> QuantizationScheme | None:
    algorithm = _kind(fields)
    if algorithm not in ("FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN"):
        return None
    return QuantizationScheme("modelopt", (128, 128) if algorithm == "FP8_PB_WO" else None)


def _read_compressed(fields: Mapping[str, Any]) -> QuantizationScheme | None:
    groups = fields.get("config_groups")
    blocks = set()
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict) or (weights.get("type"), weights.get("num_bits")) != ("float", 8):
            return None
        by_block = weights.get("strategy") == "block"
        blocks.add(_block(weights.get("block_structure")) if by_block else None)
    if len(blocks) != 1 or fields.get("format") not in ("float-quantized", "naive-quantized", None):
        return None
    return QuantizationScheme("compressed-tensors", blocks.pop())


def _kind(fields: Mapping[str, Any]) -> object:
    """The part of the config that says which of a method's formats it is."""
    inner = fields.get("quantization")
    named = inner if isinstance(inner, dict) else fields
    return named.get("quant_algo") or fields.get("format") or fields.get("fmt") or fields.get("quant_type", "unknown")


def _block(value: Any) -> tuple[int, int] | None:
    """Raises ModelUnsupportedError unless it is a pair of sizes, or missing."""
    if value is None:
        return None
    known = isinstance(value, list | tuple) and len(value) == 2 and all(type(size) is int for size in value)
    if not known or not all(0 < size <= _LARGEST_BLOCK for size in value):
        raise ModelUnsupportedError(
            f"The blocks of this quantized checkpoint are {str(value)[:80]}: only two sizes from 1 to "
            f"{_LARGEST_BLOCK:,} are supported, those of outputs and inputs."
        )
    return value[0], value[1]


_READERS = {
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_per_output,
    "modelopt": _read_modelopt,
    "compressed-tensors": _read_compressed,
}
