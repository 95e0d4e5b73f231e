"""JSON files of a model folder: bounded in size, and every kind of damage is a named error. Imports no torch."""

import json
from pathlib import Path
from typing import Any

from headrace_base.errors import ModelLoadError

_MOST_BYTES = 64 << 20  # the index of a million tensors is larger than any in use


def read_object(path: Path, model: str, most_bytes: int = _MOST_BYTES) -> dict[str, Any]:
    """The object in a JSON file of `model`. Raises ModelLoadError."""
    try:
        if path.stat().st_size > most_bytes:
            raise ModelLoadError(f"{path.name} of {model!r} is larger than {most_bytes >> 20} MiB: download it again.")
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        reason = str(error)[:200]
        raise ModelLoadError(f"{path.name} of {model!r} is not JSON ({reason}): download it again.") from error
    except OSError as error:
        raise ModelLoadError(f"{path.name} of {model!r} cannot be read: {error.strerror}.") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path.name} of {model!r} is not a JSON object: download it again.")
    return content
