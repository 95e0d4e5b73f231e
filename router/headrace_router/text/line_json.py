"""JSON that is one line for every line reader."""

from typing import Any

import orjson

_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def line_json(value: Any) -> bytes:
    """JSON bytes; keys in the order given.

    JSON does not escape three characters that end a line in Unicode, and so in Python's `str.splitlines` and in line
    readers of HTTP clients: NEL, LINE SEPARATOR, PARAGRAPH SEPARATOR. A model may generate them.
    """
    data = orjson.dumps(value)
    if data.isascii():
        return data
    for raw, escaped in _LINE_ENDS:
        data = data.replace(raw, escaped)
    return data
