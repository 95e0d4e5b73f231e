"""Constraints that are made to cost time or memory, as fields of a request."""

from typing import Any


def _schema(schema: Any) -> dict[str, Any]:
    return {"guided_json": schema}


def _nested(depth: int) -> str:
    return '{"properties": {"a": ' * depth + "{}" + "}}" * depth


HOSTILE: dict[str, dict[str, Any]] = {
    "stars of stars": {"guided_regex": "((a*)*)*b" * 50},
    "counted counts": {"guided_regex": "((a{1,100}){1,100}){1,100}"},
    "any text, counted": {"guided_regex": "(.{0,1000}){0,1000}"},
    "exponential states": {"guided_regex": "(a|b)*a(a|b){30}"},
    "exponential states, twice": {"guided_regex": "[^a]*a.{60}x|.*b.{60}y"},
    "letters of all scripts": {"guided_regex": "\\p{L}{1,2000}\\p{N}{1,2000}"},
    "parentheses": {"guided_regex": "(" * 30_000 + ")" * 30_000},
    "long choices": {"guided_choice": [f"{'a' * 60}{number}" for number in range(900)]},
    "a long text": {"guided_choice": ["x" * 60_000]},
    "optional properties": _schema({"type": "object", "properties": {f"p{n}": {} for n in range(4000)}}),
    "nesting": _schema(_nested(2000)),
    "recursion": _schema({"$ref": "#"}),
    "recursion in alternatives": _schema({"anyOf": [{"$ref": "#"}, {"type": "array", "items": {"$ref": "#"}}]}),
    "a large multiple": _schema({"type": "integer", "multipleOf": 99_991}),
    "multiples": _schema({"allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967, 9949, 9941)]}),
    "a minimum of length": _schema({"type": "string", "minLength": 1_000_000}),
    "a minimum of items": _schema({"type": "array", "minItems": 1_000_000}),
    "patterns at once": _schema({"allOf": [{"type": "string", "pattern": f"a.{{{n}}}b"} for n in range(300)]}),
    "alternatives": _schema({"anyOf": [{"type": "object", "properties": {f"p{n}": {}, "q": {}}} for n in range(900)]}),
    "an ambiguous grammar": {"guided_grammar": 'start: start start | "a" | "a" "a"'},
    "empty rules": {"guided_grammar": "start: a*\na: b*\nb: c*\nc: /x*/"},
    "long rules": {"guided_grammar": "start: " + " ".join(f"r{n}" for n in range(2000)) + "".join(
        f'\nr{n}: "a" | "b" | r{(n + 1) % 2000}?' for n in range(2000)
    )},
}  # fmt: skip
