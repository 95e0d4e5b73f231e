"""Opens the safetensors files of a checkpoint: each header is read and checked against its file. Imports no torch."""

import re
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from headrace_proto.errors import ModelLoadError

# Buffers in old checkpoints.
IGNORED_SUFFIXES = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
# Modules of the language model in checkpoints of several models.
TEXT_PARTS = ("language_model", "text_model")
_LAYER = re.compile(r"^(?:(?:model|language_model|text_model)\.)*layers\.([0-9]{1,9})\.")


def open_files(files: Iterable[Path], framework: str) -> dict[str, Any]:
    """Tensor name -> the one open file with it; no tensor is read. `framework`: pt or numpy, the type of read tensors.

    The library bounds a header's length and nesting, and compares its offsets with the file's size. Raises
    ModelLoadError.
    """
    handles: dict[str, Any] = {}
    for path in files:
        try:
            handle = safe_open(path, framework=framework)
        except SafetensorError as error:
            reason = f"{_reason(error)}; it has {path.stat().st_size:,} bytes"
            raise ModelLoadError(
                f"{path.name} is not a complete safetensors file ({reason}): download it again."
            ) from error
        except OSError as error:
            raise ModelLoadError(f"{path.name} cannot be read ({_reason(error)}): check the file.") from error
        names = handle.keys()  # type: ignore[no-untyped-call]
        if twice := handles.keys() & names:
            raise ModelLoadError(
                f"{path.name} and another file of the model have the same tensor, {min(twice)[:200]!r}: keep one of "
                "the files."
            )
        handles.update(dict.fromkeys(names, handle))
    return handles


def count_elements(
    handles: dict[str, Any], layers: int | None = None, parts: tuple[str, ...] = ()
) -> tuple[int, int, int]:
    """Elements of all floating-point tensors that a model of `layers` layers (None: unknown) reads; those of its
    matrices among them; those of its matrices in bfloat16.

    parts: if any, tensors in modules of these names alone are counted.
    """
    elements = of_matrices = in_bfloat16 = 0
    names = [name for name in handles if _is_read(name, layers) and (not parts or {*name.split(".")} & {*parts})]
    for view in (handles[name].get_slice(name) for name in names):
        shape, dtype = view.get_shape(), view.get_dtype()
        if "F" in dtype:
            elements += prod(shape)
            of_matrices += prod(shape) * (len(shape) == 2)
            in_bfloat16 += prod(shape) * (len(shape) == 2 and dtype == "BF16")
    return elements, of_matrices, in_bfloat16


def _is_read(name: str, layers: int | None) -> bool:
    """Not buffers in old checkpoints, and not the further layers and heads that predict more than one token (MTP)."""
    layer = _LAYER.search(name)
    beyond = layer is not None and layers is not None and int(layer[1]) >= layers
    return not (beyond or name.endswith(IGNORED_SUFFIXES) or "mtp" in name.split("."))


def _reason(error: Exception) -> str:
    text = str(error).strip().split("\n")[0][:200]
    return text.removeprefix("Error while deserializing header: ") or type(error).__name__
