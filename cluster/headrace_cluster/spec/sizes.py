"""Parses and formats amounts of memory."""

import re

_UNITS = {"": 1, "b": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?(b?)\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """'2GiB', '512M', '1.5 GB' or a plain number of bytes. Raises ValueError with a sentence."""
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ValueError("write an amount of memory like 2GiB, 512MiB or a number of bytes")
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


def format_bytes(count: int) -> str:
    """A short text such as '1.5 GiB'."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
