"""Strict JSON as in RFC 8259: input that parsers interpret differently is refused."""

import json
import math
from typing import Any

import orjson

from headrace_router.core.errors import InvalidRequestError, InvalidValueError

# Cost in values, as for time and memory: an object or array, and how many escapes in strings are one.
CONTAINER = 8
ESCAPES_PER_VALUE = 8


class JsonError(InvalidRequestError, code="invalid_json"):
    """The body is not acceptable JSON."""


def parse(body: bytes, max_depth: int, max_values: int) -> Any:
    """The value. Refuses bad UTF-8, NaN, 1e400, half surrogates, duplicate keys and deep nesting.

    Raises JsonError, or InvalidValueError that names the field of a number that is not finite.

    max_values: numbers and strings; counted before the body is parsed. An object or array counts as 8.
    """
    if not body:
        raise JsonError("The body is empty: send a JSON object.")
    _check_values(body, max_values)
    try:
        # The strict parser first: it is fast, and rejects NaN, surrogates and unlimited depth.
        orjson.loads(body)
        value = json.loads(body, object_pairs_hook=_object, parse_int=_int, parse_float=_float)
    except RecursionError:
        raise JsonError(f"The body is nested deeper than {max_depth} levels.") from None
    except ValueError as error:
        if isinstance(error, orjson.JSONDecodeError):
            _check_numbers(body)
            raise JsonError(f"The body is not valid JSON (line {error.lineno}, column {error.colno}).") from None
        raise JsonError("The body is not valid JSON: a number in it is too long.") from None
    _check_depth(value, max_depth)
    return value


def _check_values(body: bytes, limit: int) -> None:
    """Raises JsonError if the body has more values than that."""
    escapes = body.count(b"\\") // ESCAPES_PER_VALUE
    if _count(body) + escapes <= limit:  # at most too many: commas and brackets in strings count as well
        return
    quoted = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # every quotation mark left begins or ends a string
    if quoted.count(b'"') <= 4 * limit:  # a value and its key are two strings
        outside = b"".join(quoted.split(b'"')[::2])
        if _count(outside) + escapes <= limit:
            return
    raise JsonError(f"The body has more than {limit} values; send shorter lists.")


def _count(text: bytes) -> int:
    return text.count(b",") + (CONTAINER - 1) * (text.count(b"[") + text.count(b"{"))


# Functions of ours, though `int` and `float` would do: they let other threads run while a long list is parsed.
def _int(digits: str) -> int:
    return int(digits)


def _float(digits: str) -> float:
    return float(digits)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise JsonError("The body has an object with the same key twice.")
    return value


def _check_numbers(body: bytes) -> None:
    """Names the field of a number that is not finite, as Python writes NaN and Infinity. Raises InvalidValueError."""
    try:
        level: list[tuple[str, Any]] = [("", json.loads(body))]
    except (ValueError, RecursionError):
        return
    while level:
        for path, value in level:
            if isinstance(value, float) and not math.isfinite(value):
                raise InvalidValueError(
                    f"'{path[:100]}' is not valid: input should be a finite number.", param=path[:100] or None
                )
        level = [member for path, value in level for member in _members(path, value)]


def _members(path: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"{path}.{name}" if path else name, member) for name, member in value.items()]
    return [(f"{path}[{index}]", member) for index, member in enumerate(value)] if isinstance(value, list) else []


def _check_depth(value: Any, max_depth: int) -> None:
    depth = 0
    level = [value] if isinstance(value, (dict, list)) else []
    while level:
        depth += 1
        if depth > max_depth:
            raise JsonError(f"The body is nested deeper than {max_depth} levels.")
        children = (child for entry in level for child in (entry.values() if isinstance(entry, dict) else entry))
        level = [child for child in children if isinstance(child, (dict, list))]
