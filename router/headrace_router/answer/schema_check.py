"""What the library does not see in a JSON Schema: numbers that it rounds, parts without end, names that are used up.

Slow for large schemas: it runs in the process that tries grammars.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from llguidance import LLMatcher, LLTokenizer

from headrace_proto.grammar import GrammarError, compile_grammar

MAX_NUMBER = 2**53 - 1  # the library has binary64 numbers: integers beyond it are not exact (RFC 8259, section 6)
MAX_BOUND = 2**63 - 2**10  # the library's integers have 64 bits; the last one below 2^63 that is exact in binary64
MAX_MULTIPLE = (2**32 - 1) // 10  # the digits of `multipleOf`: the library calculates in 32 bits
_NUMBERS = (
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "minItems",
    "maxItems", "minProperties", "maxProperties",
)  # fmt: skip
_BOUNDS = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}
_NAMED = ("properties", "patternProperties")  # schemas by name
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = ("items", "additionalItems", "additionalProperties")
_COMPACT: Any = {"whitespace_flexible": False}


@dataclass(frozen=True, eq=False)
class _Part:
    """A schema in a schema. path: for errors. holder, key: what contains it, and where."""

    path: str
    holder: Any
    key: Any

    @property
    def schema(self) -> Any:
        return self.holder[self.key]


def checked_schema(schema: dict[str, Any], tokenizer: LLTokenizer) -> dict[str, Any]:
    """The schema; parts of it that only endless values follow are `false` then, and bounds beyond 64 bits within them.

    Raises GrammarError, which names the part that cannot be followed.
    """
    root = _Part("", [schema], 0)
    parts = _parts(root)
    for part in parts:
        _narrow_bounds(part.schema)
        _check_numbers(part.schema, part.path)
        _check_names(part.schema, part.path, tokenizer)
    finite = _finite(root, parts, false=True)
    if id(schema) not in finite:
        references = (part.schema.get("$ref") for part in parts if id(part.schema) not in finite)
        name = next((reference for reference in references if isinstance(reference, str)), "#")
        raise GrammarError(f"no value of it has an end: '{name[:100]}' requires itself")
    finite = _finite(root, parts, false=False)
    for part in [part for part in parts[1:] if id(part.schema) not in finite]:
        part.holder[part.key] = False
    return schema


def _parts(root: _Part) -> list[_Part]:
    """All schemas that decide about a value, each once."""
    found, seen = [root], {id(root.schema)}
    for part in found:
        target = _target(part.schema, root)
        for inner in (*_inner(part), *([target] if target else ())):
            if isinstance(inner.schema, dict) and id(inner.schema) not in seen:
                seen.add(id(inner.schema))
                found.append(inner)
    return found


def _inner(part: _Part) -> Iterator[_Part]:
    """The schemas in a schema."""
    before = f"{part.path}." if part.path else ""
    for keyword, value in part.schema.items():
        if keyword in _NAMED and isinstance(value, dict):
            yield from (_Part(f"{before}{keyword}.{name}", value, name) for name in value)
        elif keyword in _LISTED and isinstance(value, list):
            yield from (_Part(f"{before}{keyword}[{place}]", value, place) for place in range(len(value)))
        elif keyword in _SINGLE:
            yield _Part(f"{before}{keyword}", part.schema, keyword)


def _target(schema: dict[str, Any], root: _Part) -> _Part | None:
    """What its `$ref` names in the same schema; None without such a reference."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    found = root
    try:
        for step in reference.split("/")[1:]:
            name, holder = unquote(step).replace("~1", "/").replace("~0", "~"), found.schema
            found = _Part(f"{found.path}.{name}".lstrip("."), holder, int(name) if isinstance(holder, list) else name)
        return found if isinstance(found.schema, dict | bool) else None
    except (LookupError, TypeError, ValueError):
        return None  # the library refuses it


def _narrow_bounds(schema: dict[str, Any]) -> None:
    """Moves bounds beyond exact numbers inwards, in place: those of 64-bit integers are common, and no limit in use."""
    for name, sign in _BOUNDS.items():
        bound = schema.get(name)
        if isinstance(bound, int | float) and not isinstance(bound, bool) and sign * bound > MAX_NUMBER:
            schema[name] = sign * (int(min(sign * bound, MAX_BOUND)) // 2**10 * 2**10)


def _is_narrowed(schema: dict[str, Any], name: str) -> bool:
    """Whether it is a large bound that `_narrow_bounds` has made exact."""
    sign, bound = _BOUNDS.get(name, 0), schema[name]
    return isinstance(bound, int) and MAX_NUMBER < sign * bound <= MAX_BOUND


def _check_numbers(schema: dict[str, Any], path: str) -> None:
    """Raises GrammarError for a number that the library would round."""
    names = [name for name in (*_NUMBERS, "const", "enum") if name in schema and not _is_narrowed(schema, name)]
    found = [(f"{path}.{name}".lstrip("."), schema[name]) for name in names]
    for place, value in found:
        if isinstance(value, dict):
            found += [(f"{place}.{name}", member) for name, member in value.items()]
        elif isinstance(value, list):
            found += [(f"{place}[{number}]", member) for number, member in enumerate(value)]
        elif isinstance(value, int | float) and not isinstance(value, bool) and not abs(value) <= MAX_NUMBER:
            raise GrammarError(
                f"'{place[-100:]}' is {str(value)[:25]}, and numbers beyond {MAX_NUMBER} (2^53 - 1) are not exact; "
                "use a smaller number, or a string"
            )
    multiple = schema.get("multipleOf")
    if isinstance(multiple, int | float) and not isinstance(multiple, bool):
        place = f"{path}.multipleOf".lstrip(".")[-100:]
        if multiple <= 0:
            raise GrammarError(f"'{place}' is {multiple}, and must be above 0")
        digits = Decimal(str(multiple)).normalize()
        if digits.scaleb(max(0, -int(digits.as_tuple().exponent))) > MAX_MULTIPLE:
            raise GrammarError(f"'{place}' is {multiple}, and has too many digits; use at most 8")


def _check_names(schema: dict[str, Any], path: str, tokenizer: LLTokenizer) -> None:
    """Raises GrammarError where an object with all of its `properties` could go on, and no name is left for it."""
    patterns: Any = schema.get("patternProperties")
    names: Any = schema.get("properties")
    given = all(value and isinstance(value, dict) for value in (patterns, names))
    if not given or schema.get("additionalProperties") is not False:
        return
    zero = {"const": 0}
    small = {
        "type": "object",
        "properties": dict.fromkeys(names, zero),
        "required": [*names],
        "patternProperties": dict.fromkeys(patterns, zero),
        "additionalProperties": False,
    }
    text = "{" + "".join(f"{json.dumps(name, ensure_ascii=False)}:0," for name in names)
    grammar = LLMatcher.grammar_from_json_schema(small, overrides=_COMPACT)
    try:
        matcher = compile_grammar(tokenizer, grammar)
    except GrammarError:
        return  # the whole schema has the same fault
    if matcher.consume_tokens(tokenizer.tokenize_str(text)):
        matcher.compute_bitmask()
        if matcher.is_error():
            place = f"{path}.patternProperties".lstrip(".")[-100:]
            raise GrammarError(f"'{place}' has no name that 'properties' does not have; remove it")


def _finite(root: _Part, parts: list[_Part], *, false: bool) -> set[int]:
    """The ids of those schemas that a value of finite size follows, as far as their parts decide. false: of `false`."""
    found: set[int] = set()

    def ends(schema: Any) -> bool:
        if isinstance(schema, bool):
            return schema or false
        return not isinstance(schema, dict) or id(schema) in found

    size = -1
    while size < len(found):
        size = len(found)
        for part in reversed(parts):
            if id(part.schema) not in found and _ends(part.schema, root, ends):
                found.add(id(part.schema))
    return found


def _ends(schema: dict[str, Any], root: _Part, ends: Callable[[Any], bool]) -> bool:
    """Whether it has a value of finite size, if its parts have one of which `ends` knows it."""
    target = _target(schema, root)
    if target is not None and not ends(target.schema):
        return False
    if not all(map(ends, _list(schema, "allOf"))):
        return False
    for keyword in ("anyOf", "oneOf"):
        if (branches := _list(schema, keyword)) and not any(map(ends, branches)):
            return False
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "const" in schema or "enum" in schema or set(map(str, kinds)) - {"object", "array"}:
        return True
    return ("object" in kinds and _object_ends(schema, ends)) or ("array" in kinds and _array_ends(schema, ends))


def _object_ends(schema: dict[str, Any], ends: Callable[[Any], bool]) -> bool:
    properties, patterns = schema.get("properties"), schema.get("patternProperties")
    properties = properties if isinstance(properties, dict) else {}
    others = [schema.get("additionalProperties", True), *(patterns.values() if isinstance(patterns, dict) else ())]
    if any(
        not (ends(properties[name]) if name in properties else any(map(ends, others)))
        for name in _list(schema, "required")
    ):
        return False
    least = schema.get("minProperties", 0)
    return not isinstance(least, int) or sum(map(ends, properties.values())) >= least or any(map(ends, others))


def _array_ends(schema: dict[str, Any], ends: Callable[[Any], bool]) -> bool:
    """Older drafts have a list of the first items in `items`, and the others in `additionalItems`."""
    items = schema.get("items", True)
    first, others = _list(schema, "prefixItems"), items
    if isinstance(items, list):
        first, others = items, schema.get("additionalItems", True)
    least = schema.get("minItems", 0)
    return not isinstance(least, int) or (all(map(ends, first[:least])) and (len(first) >= least or ends(others)))


def _list(schema: dict[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []
