"""Bounded JSON Schemas of growing nastiness, the same ones each time."""

from random import Random
from typing import Any

NAMES = ("id", "größe", 'a "quoted" name', "tab\there", "nested.path", "emoji 🦜", "x" * 40, "", "$ref", "\\")
PATTERNS = ("[a-z]{1,6}", "[0-9]{3}-[0-9]{4}", "(ab|cd){1,3}", "[A-Z][a-z]{0,5}( [A-Z][a-z]{0,5})?", "\\$[0-9]{1,4}")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4")


def bounded_schema(seed: int, depth: int) -> dict[str, Any]:
    """A schema that deep at most, whose instances have a few hundred characters at most."""
    random = Random(seed)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$defs": {"leaf": _leaf(random), "pair": {"type": "array", "prefixItems": [_leaf(random)], "items": False}},
        **_object(random, depth),
    }


def _any(random: Random, depth: int) -> Any:
    if depth <= 0:
        return random.choice((_leaf(random), {"$ref": "#/$defs/leaf"}))
    kind = random.randrange(6)
    if kind == 0:
        return {"anyOf": [_any(random, depth - 1), {"type": "null"}, _leaf(random)]}
    if kind == 1:
        return {"allOf": [{"type": "object"}, _object(random, depth - 1)]}
    if kind == 2:
        items = {"type": "array", "items": _any(random, depth - 1), "maxItems": random.randrange(1, 4)}
        return items | {"minItems": random.randrange(2)}
    if kind == 3:
        prefix = [_leaf(random) for _ in range(random.randrange(1, 4))]
        return {"type": "array", "prefixItems": prefix, "minItems": len(prefix), "items": False}
    if kind == 4:
        return {"$ref": "#/$defs/pair"}
    return _object(random, depth - 1)


def _object(random: Random, depth: int) -> dict[str, Any]:
    names = random.sample(NAMES, random.randrange(1, 5))
    return {
        "type": "object",
        "properties": {name: _any(random, depth - 1) for name in names},
        "required": random.sample(names, random.randrange(len(names) + 1)),
        "additionalProperties": False,
    }


def _leaf(random: Random) -> dict[str, Any]:
    low = random.randrange(-50, 50)
    longest = random.randrange(1, 12)
    choices: tuple[dict[str, Any], ...] = (
        {"type": "string", "maxLength": longest, "minLength": random.randrange(longest + 1)},
        {"type": "string", "pattern": f"^{random.choice(PATTERNS)}$"},
        {"type": "string", "format": random.choice(FORMATS)},
        {"type": "integer", "minimum": low, "maximum": low + random.randrange(1000)},
        {"type": "integer", "multipleOf": random.choice((3, 7, 10)), "minimum": 0, "exclusiveMaximum": 500},
        {"type": "number", "minimum": low, "maximum": low + 3},
        {"enum": [random.choice(NAMES), random.randrange(99), None, True, {"a": [1, {"b": "ü"}]}]},
        {"const": random.choice(NAMES)},
        {"type": ["boolean", "null"]},
    )
    return random.choice(choices)
