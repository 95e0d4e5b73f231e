"""`quantization_config` of a checkpoint: which formats are read, and what the tensors do not show. Imports no torch."""

from collections.abc import Container, Mapping, Sequence
from math import lcm
from pathlib import Path
from typing import Any, Literal, NamedTuple

from headrace_base.errors import ModelLoadError, ModelUnsupportedError
from headrace_worker.model.gguf_config import GGUF_FAMILIES
from headrace_worker.model.json_files import read_object

_FIELD = "quantization_config"
_OLD_FIELD = "compression_config"  # field of compressed-tensors
_OLD_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")  # files of modelopt, GPTQ and AWQ
_LARGEST_BLOCK = 1 << 16
SERVED = (
    "fp8",
    "fbgemm_fp8",
    "awq (gemm)",
    "gptq (4 and 8 bits)",
    "mxfp4 (gpt-oss)",
    "compressed-tensors (float-quantized, int-quantized, pack-quantized, mxfp4-pack-quantized, nvfp4-pack-quantized)",
    "modelopt (FP8, NVFP4, both)",
    "auto-round (packed as auto_gptq or awq)",
)


class Stored(NamedTuple):
    """The tensors of a matrix, without the name of its module."""

    first: str  # shows that a matrix has this format
    others: tuple[str, ...]  # that it must have
    dtypes: tuple[str, ...] = ("I32",)  # dtypes that the tensor `first` may have


SCALES = (
    "weight_scale_inv",
    "weight_scale",
    "scale",
    "qscale_weight",
)  # scales of e4m3, in the order in which they are sought
STORED = {  # by kind of scheme; others than e4m3
    "awq": Stored("qweight", ("qzeros", "scales")),
    "gptq": Stored("qweight", ("qzeros", "scales")),
    "packed": Stored("weight_packed", ("weight_scale", "weight_shape")),
    "int8": Stored("weight", ("weight_scale",), ("I8",)),
    "mxfp4": Stored("weight_packed", ("weight_scale",), ("U8",)),
    "nvfp4": Stored("weight_packed", ("weight_scale", "weight_global_scale"), ("U8",)),
    "modelopt-nvfp4": Stored("weight", ("weight_scale", "weight_scale_2"), ("U8",)),
}
_CODES = ("qweight", "weight_packed", *SCALES[:2])  # tensors that only quantized matrices have


class QuantizationScheme(NamedTuple):
    """How quantized matrices are stored."""

    method: str  # in quantization_config
    kind: Literal["e4m3", "awq", "gptq", "packed", "int8", "mxfp4", "nvfp4", "modelopt-nvfp4", "mxfp4-experts"] = (
        "e4m3"  # the format's class: formats.py
    )
    block: tuple[int, int] | None = None  # e4m3: outputs and inputs of one scale; None: one per output, or one for all
    bits: int = 8  # bits of a value, without its scale
    zeros_less: int = 0  # gptq: what is missing from stored zeros
    group: int = 0  # inputs with one scale; 0: all of them

    @property
    def unit(self) -> int:
        """Inputs that ranks do not divide."""
        return lcm(1 if self.block is None else self.block[1], self.group or 1)


def with_quantization(folder: Path, fields: dict[str, Any], model: str) -> dict[str, Any]:
    """The fields of config.json, with what checkpoints keep elsewhere as quantization_config."""
    if fields.get(_FIELD):
        return fields
    text = fields.get("text_config")
    for place in (fields, text if isinstance(text, dict) else {}):
        if found := place.get(_FIELD):
            return fields | {_FIELD: found}
        if isinstance(old := place.get(_OLD_FIELD), dict):
            inner = old.get(_FIELD)
            return fields | {
                _FIELD: {"quant_method": "compressed-tensors"} | (inner if isinstance(inner, dict) else old)
            }
    for name in _OLD_FILES:
        if (folder / name).is_file():
            found = read_object(folder / name, model)
            method = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq"}.get(name, "awq")
            inner = found.get("quantization") if method == "modelopt" else found
            return fields | {_FIELD: {"quant_method": method} | (inner if isinstance(inner, dict) else {})}
    return fields


def read_scheme(family: str, quantization: Any) -> QuantizationScheme | None:
    """The scheme that quantization_config describes; None without one. Raises ModelUnsupportedError if not served."""
    if not quantization:
        return None
    fields = quantization if isinstance(quantization, Mapping) else {}
    method = fields.get("quant_method", "unknown")
    reader = None
    if isinstance(method, str):
        reader = _read_modelopt if method.startswith("modelopt") else _READERS.get(method)
    scheme = reader(fields) if reader is not None else None
    if scheme is None:
        other = " or a GGUF" if family in GGUF_FAMILIES else ""
        what = method if reader is None else f"{method} ({_kind(fields)})"
        raise ModelUnsupportedError(
            f"The checkpoint is quantized by {str(what)[:80]}, which is not served ({', '.join(SERVED)} are): give one "
            f"of these, unquantized safetensors{other}."
        )
    return scheme


def check_stored(scheme: QuantizationScheme | None, dtypes: Mapping[str, str]) -> None:
    """Raises ModelLoadError for quantized matrices without their other tensors, or without a config.

    dtypes: of all tensors, by name.
    """
    if scheme is None:
        if found := next((name for name in dtypes if name.rpartition(".")[2] in _CODES), None):
            raise ModelLoadError(
                f"The checkpoint has quantized tensors, {found[:200]!r} first, but config.json has no "
                "quantization_config that says how: download config.json again, or add it."
            )
        return
    stored = STORED.get(scheme.kind)
    for name, dtype in dtypes.items():
        owner, _, leaf = name.rpartition(".")
        if stored is not None and leaf == stored.first and dtype in stored.dtypes:
            check_complete(stored, owner, dtypes)
        elif leaf == "weight" and dtype == "F8_E4M3" and not any(f"{owner}.{scale}" in dtypes for scale in SCALES):
            raise no_scale(name)


def check_complete(stored: Stored, owner: str, names: Container[str]) -> None:
    """Raises ModelLoadError unless all tensors of a matrix are there."""
    for name in stored.others:
        if f"{owner}.{name}" not in names:
            raise ModelLoadError(
                f"Tensor {f'{owner}.{stored.first}'!r} has no {name!r} beside it: the checkpoint is incomplete, "
                "download it again."
            )


def no_scale(name: str) -> ModelLoadError:
    """For a matrix in e4m3, or experts in MXFP4."""
    return ModelLoadError(f"Tensor {name!r} has no scale beside it: the checkpoint is incomplete, download it again.")


def check_online(method: str | None, quantized_by: str | None) -> None:
    """Raises ModelUnsupportedError for a checkpoint that is quantized already. quantized_by: its own method."""
    if method is not None and quantized_by is not None:
        raise ModelUnsupportedError(
            f"--quantization {method} is for unquantized checkpoints, and this one is {quantized_by[:80]}: leave it "
            "out."
        )


def _read_fp8(fields: Mapping[str, Any]) -> QuantizationScheme | None:
    if fields.get("fmt", "e4m3") != "e4m3":
        return None
    return QuantizationScheme("fp8", block=_block(fields.get("weight_block_size")))


def _read_per_output(fields: Mapping[str, Any]) -> QuantizationScheme:
    return QuantizationScheme(fields["quant_method"])


def _read_modelopt(fields: Mapping[str, Any]) -> QuantizationScheme | None:
    inner = fields.get("quantization")
    named = inner if isinstance(inner, dict) else fields
    layers = named.get("quantized_layers")
    if str(named.get("quant_algo")).upper() == "MIXED_PRECISION" and isinstance(layers, dict):
        return _combined([_modelopt_algorithm(layer) for layer in layers.values()])
    return _modelopt_algorithm(named)


def _modelopt_algorithm(fields: Any) -> QuantizationScheme | None:
    algorithm = str(fields.get("quant_algo")).upper() if isinstance(fields, dict) else ""
    if algorithm == "NVFP4":
        return QuantizationScheme("modelopt", "modelopt-nvfp4", bits=4, group=16)
    if algorithm not in ("FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN"):
        return None
    return QuantizationScheme("modelopt", block=(128, 128) if algorithm == "FP8_PB_WO" else None)


def _combined(schemes: Sequence[QuantizationScheme | None]) -> QuantizationScheme | None:
    """The scheme of matrices in several formats, which their tensors show: e4m3, and one other format."""
    known = [scheme for scheme in schemes if scheme is not None]
    blocks = {scheme.block for scheme in known if scheme.kind == "e4m3"}
    coded = [scheme for scheme in known if scheme.kind != "e4m3"]
    if len(known) < max(1, len(schemes)) or len(blocks) > 1 or len({scheme.kind for scheme in coded}) > 1:
        return None
    groups = [scheme.group for scheme in coded if scheme.group]
    return (coded or known)[0]._replace(
        block=next(iter(blocks), None), bits=max(scheme.bits for scheme in known), group=lcm(*groups) if groups else 0
    )


def _read_awq(fields: Mapping[str, Any]) -> QuantizationScheme | None:
    bits = _bits(fields, "bits") or _bits(fields, "w_bit") or 4
    if bits != 4 or str(fields.get("version", "gemm")).lower() != "gemm":
        return None
    group = _group(fields, "group_size") or _group(fields, "q_group_size")
    return QuantizationScheme("awq", "awq", bits=4, group=group)


def _read_gptq(fields: Mapping[str, Any]) -> QuantizationScheme | None:
    bits = _bits(fields, "bits")
    version = fields.get("checkpoint_format") or fields.get("format") or "gptq"
    if bits not in (4, 8) or version not in ("gptq", "gptq_v2"):
        return None
    group = _group(fields, "group_size")
    return QuantizationScheme("gptq", "gptq", bits=bits, zeros_less=version == "gptq", group=group)


def _read_auto_round(fields: Mapping[str, Any]) -> QuantizationScheme | None:
    """Its tensors are those of AWQ or of GPTQ."""
    packing = str(fields.get("packing_format", ""))
    if "awq" in packing:
        return _read_awq(fields)
    return _read_gptq(fields) if "auto_gptq" in packing else None


def _read_compressed(fields: Mapping[str, Any]) -> QuantizationScheme | None:
    groups = fields.get("config_groups")
    # A group without weights is of attention, or of what is cached.
    found = [
        _compressed_group(group)
        for group in (groups.values() if isinstance(groups, dict) else ())
        if not isinstance(group, dict) or group.get("weights") is not None
    ]
    scheme = _combined(found)
    formats = {
        "e4m3": ("float-quantized", "naive-quantized"),
        "packed": ("pack-quantized",),
        "int8": ("int-quantized",),
        "mxfp4": ("mxfp4-pack-quantized",),
        "nvfp4": ("nvfp4-pack-quantized",),
    }
    if scheme is None:
        return None
    stored = fields.get("format")
    if len({each.kind for each in found if each is not None}) > 1:
        return scheme
    if scheme.kind == "packed" and scheme.bits == 8 and stored in ("int-quantized", "naive-quantized"):
        scheme = scheme._replace(kind="int8")
    return scheme if stored in (*formats[scheme.kind], "mixed-precision", None) else None


def _compressed_group(group: Any) -> QuantizationScheme | None:
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        return None
    kind, bits, group = weights.get("type"), _bits(weights, "num_bits"), _group(weights, "group_size")
    if kind == "float" and bits == 8:
        by_block = weights.get("strategy") == "block"
        return QuantizationScheme(
            "compressed-tensors", block=_block(weights.get("block_structure")) if by_block else None
        )
    if kind == "float" and bits == 4:
        name = {32: "mxfp4", 16: "nvfp4"}.get(group)
        if name is None:
            return None
        return QuantizationScheme("compressed-tensors", name, bits=4, group=group)  # type: ignore[arg-type]
    if kind != "int" or bits not in (4, 8):
        return None
    return QuantizationScheme("compressed-tensors", "packed", bits=bits, group=group)


def _read_mxfp4(_fields: Mapping[str, Any]) -> QuantizationScheme:
    return QuantizationScheme("mxfp4", "mxfp4-experts", bits=4, group=32)


def _group(fields: Mapping[str, Any], name: str) -> int:
    """0 for all inputs, which is also written as -1."""
    return max(0, _bits(fields, name))


def _bits(fields: Mapping[str, Any], name: str) -> int:
    """0 where the field is missing; -1 where it is no whole number."""
    value = fields.get(name, 0)
    return value if type(value) is int else -1


def _kind(fields: Mapping[str, Any]) -> object:
    """The part of the config that says which of a method's formats it is."""
    inner = fields.get("quantization")
    named = inner if isinstance(inner, dict) else fields
    names = ("quant_algo", "version", "checkpoint_format", "packing_format", "format", "fmt", "quant_type")
    found = [str(named[name]) for name in names if named.get(name)]
    bits = named.get("bits", named.get("w_bit"))
    return ", ".join([*found, *([f"{bits} bits"] if bits else [])]) or "unknown"


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
    "awq": _read_awq,
    "auto-round": _read_auto_round,
    "intel/auto-round": _read_auto_round,
    "gptq": _read_gptq,
    "mxfp4": _read_mxfp4,
    "compressed-tensors": _read_compressed,
}
