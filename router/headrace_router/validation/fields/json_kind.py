"""Kinds of JSON values, and when two values are the same."""

from enum import Flag, auto
from typing import Any


class JsonKind(Flag):
    """A set of kinds: `STRING | LIST` is either."""

    BOOLEAN = auto()
    INTEGER = auto()
    NUMBER = auto()
    STRING = auto()
    LIST = auto()
    OBJECT = auto()

    def fits(self, value: Any) -> bool:
        """Whether a decoded JSON value is of one of these kinds. 1.0 is an integer, as JSON has one type of number."""
        return bool(_kind_of(value) & self)

    def __str__(self) -> str:
        return " or ".join(str(kind.name).lower() for kind in self)


def _kind_of(value: Any) -> JsonKind:
    if isinstance(value, bool):
        return JsonKind.BOOLEAN
    if isinstance(value, int):
        return JsonKind.INTEGER | JsonKind.NUMBER
    if isinstance(value, float):
        return JsonKind.INTEGER | JsonKind.NUMBER if value.is_integer() else JsonKind.NUMBER
    if isinstance(value, str):
        return JsonKind.STRING
    return JsonKind.LIST if isinstance(value, list) else JsonKind.OBJECT


def same_json(given: Any, allowed: Any) -> bool:
    """Whether a client's value is this one: 1 is 1.0, 0 is not false, and members that are null count as absent.

    Its depth is that of `allowed`, whatever the client sent.
    """
    if isinstance(allowed, dict):
        if not isinstance(given, dict):
            return False
        members = {name: value for name, value in given.items() if value is not None}
        return members.keys() == allowed.keys() and all(same_json(members[name], allowed[name]) for name in allowed)
    if isinstance(allowed, list):
        return isinstance(given, list) and len(given) == len(allowed) and all(map(same_json, given, allowed))
    return _kind_of(given) == _kind_of(allowed) and bool(given == allowed)
