"""Opens the safetensors files of a checkpoint: each header is read and checked against its file. Imports no torch."""

import re
from collections import Counter
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from headrace_base.errors import ModelLoadError

# Buffers in old checkpoints.
IGNORED_SUFFIXES = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
# Modules of the language model in checkpoints of several models.
TEXT_PARTS = ("language_model", "text_model")
_CODES = re.compile(r"(?:\.(?:qweight|weight_packed|weight)|_blocks)$")
_CODE_BITS = {"I32": 32, "I8": 8, "U8": 8, "F8_E4M3": 8}
_SCALES = re.compile(r"(?:\.(?:scales|weight_scale(?:_inv|_2)?|weight_global_scale)|_scales)$")
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


class Counted(NamedTuple):
    """Numbers of a model's tensors in floating point, those among them that are codes included."""

    elements: int = 0
    matrices: int = 0  # elements of matrices that are no codes
    halves: int = 0  # elements of the bfloat16 matrices among these
    codes: int = 0
    code_bytes: int = 0  # bytes of codes, with their scales

    def packed_bytes(self, *, rounded: bool = False) -> int:
        """On a CPU in float32, where codes and bfloat16 stay as they are; rounded: all matrices in bfloat16."""
        return 4 * (self.elements - self.codes) - 2 * (self.matrices if rounded else self.halves) + self.code_bytes


def count_elements(
    handles: dict[str, Any], layers: int | None = None, parts: tuple[str, ...] = (), bits: int = 8
) -> Counted:
    """Counts all tensors that a model of `layers` layers (None: unknown) reads. bits: bits of a code.

    parts: if any, tensors in modules of these names alone are counted.
    """
    found = Counter[str]()
    names = [name for name in handles if _is_read(name, layers) and (not parts or {*name.split(".")} & {*parts})]
    for name in names:
        view = handles[name].get_slice(name)
        size, dtype = prod(view.get_shape()), view.get_dtype()
        if dtype in _CODE_BITS and _CODES.search(name):
            found["codes"] += (count := size * _CODE_BITS[dtype] // bits)
            found["elements"] += count
            found["code_bytes"] += size * _CODE_BITS[dtype] // 8
        elif _SCALES.search(name):
            found["code_bytes"] += size * (4 if "32" in dtype else 2)
        elif "F" in dtype:
            found["elements"] += size
            if len(view.get_shape()) == 2:
                found["matrices"] += size
                found["halves"] += size * (dtype == "BF16")
    return Counted(**found)


def _is_read(name: str, layers: int | None) -> bool:
    """Not buffers in old checkpoints, and not the further layers and heads that predict more than one token (MTP)."""
    layer = _LAYER.search(name)
    beyond = layer is not None and layers is not None and int(layer[1]) >= layers
    return not (beyond or name.endswith(IGNORED_SUFFIXES) or "mtp" in name.split("."))


def _reason(error: Exception) -> str:
    text = str(error).strip().split("\n")[0][:200]
    return text.removeprefix("Error while deserializing header: ") or type(error).__name__
