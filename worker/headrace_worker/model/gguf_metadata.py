"""Values of a GGUF file's metadata by key and type: the file is data from anywhere. Imports no torch.

Each function raises ModelLoadError when the value has another type, or is absent and there is no default.
"""

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from headrace_base.errors import ModelLoadError

Metadata = Mapping[str, Any]


def text(metadata: Metadata, key: str, default: str | None = None) -> str:
    value: str = _value(metadata, key, default)
    return value if isinstance(value, str) else _refuse(key, "a string")


def number(metadata: Metadata, key: str, default: int | None = None) -> int:
    value: int = _value(metadata, key, default)
    return value if type(value) is int else _refuse(key, "one number")


def real(metadata: Metadata, key: str, default: float | None = None) -> float:
    value = _value(metadata, key, default)
    return float(value) if type(value) in (int, float) and math.isfinite(value) else _refuse(key, "one finite number")


def flag(metadata: Metadata, key: str, default: bool) -> bool:
    value: bool = _value(metadata, key, default)
    return value if isinstance(value, bool) else _refuse(key, "true or false")


def texts(metadata: Metadata, key: str) -> Sequence[str]:
    value: Sequence[str] = _value(metadata, key, None)
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        _refuse(key, "a list of strings")
    return value


def numbers(metadata: Metadata, key: str) -> Sequence[int]:
    """Empty when the key is absent."""
    value: Sequence[int] = metadata.get(key, ())
    if not isinstance(value, (tuple, list, array)) or not all(type(entry) is int for entry in value):
        _refuse(key, "a list of numbers")
    return value


def optional_number(metadata: Metadata, key: str) -> int | None:
    return number(metadata, key) if key in metadata else None


def _value(metadata: Metadata, key: str, default: object) -> Any:
    value = metadata.get(key, default)
    if value is None:
        raise ModelLoadError(f"The GGUF file lacks {key!r}: it is damaged or of an unknown kind.")
    return value


def _refuse(key: str, kind: str) -> NoReturn:
    raise ModelLoadError(f"The GGUF file's {key!r} is not {kind}: it is damaged or of an unknown kind.")
