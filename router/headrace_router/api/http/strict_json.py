"""Strict JSON as in RFC 8259: input that parsers interpret differently is refused (RELIABILITY R6)."""

import json
from typing import Any

import orjson

from headrace_router.core.errors import InvalidRequestError


class JsonError(InvalidRequestError, code="invalid_json"):
    """The body is not acceptable JSON."""


def parse(body: bytes, max_depth: int) -> Any:
    """The value. Refuses bad UTF-8, NaN, 1e400, half surrogates, duplicate keys and deep nesting: raises JsonError."""
    if not body:
        raise JsonError("The body is empty: send a JSON object.")
    try:
        # The strict parser first: it is fast, and rejects NaN, surrogates and unlimited depth.
        orjson.loads(body)
        value = json.loads(body, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except RecursionError:
        raise JsonError(f"The body is nested deeper than {max_depth} levels.") from None
    except ValueError as error:
        if isinstance(error, orjson.JSONDecodeError):
            raise JsonError(f"The body is not valid JSON (line {error.lineno}, column {error.colno}).") from None
        raise JsonError("The body is not valid JSON: a number in it is too long.") from None
    _check_depth(value, max_depth)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise JsonError("The body has an object with the same key twice.")
    return value


def _refuse_constant(_name: str) -> Any:
    raise JsonError("The body contains NaN or Infinity, which JSON does not have.")


def _check_depth(value: Any, max_depth: int) -> None:
    depth = 0
    level = [value] if isinstance(value, (dict, list)) else []
    while level:
        depth += 1
        if depth > max_depth:
            raise JsonError(f"The body is nested deeper than {max_depth} levels.")
        children = (child for entry in level for child in (entry.values() if isinstance(entry, dict) else entry))
        level = [child for child in children if isinstance(child, (dict, list))]
