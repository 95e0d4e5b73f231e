"""Opens the safetensors files of a checkpoint: each header is read and checked against its file. Imports no torch."""

from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from headrace_proto.errors import ModelLoadError

# Buffers in old checkpoints.
IGNORED_SUFFIXES = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


def open_files(files: Iterable[Path], framework: str) -> dict[str, Any]:
    """Tensor name -> the open file with it; no tensor is read. `framework`: pt or numpy, the type of read tensors.

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
        handles.update(dict.fromkeys(handle.keys(), handle))  # type: ignore[no-untyped-call]
    return handles


def float_elements(handles: dict[str, Any]) -> int:
    """Number of elements of all floating-point tensors that a model reads."""
    views = (handle.get_slice(name) for name, handle in handles.items() if not name.endswith(IGNORED_SUFFIXES))
    return sum(prod(view.get_shape()) for view in views if "F" in view.get_dtype())


def _reason(error: Exception) -> str:
    text = str(error).strip().split("\n")[0][:200]
    return text.removeprefix("Error while deserializing header: ") or type(error).__name__
