"""What an answer must be, as a grammar: made from a request, and tried before a replica gets it.

A JSON answer has at most two white-space characters between its tokens: with more, a model that has nothing to say
continues with white space until its tokens are used up.
"""

import json
import re
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

from llguidance import LLMatcher

from headrace_router.answer.grammar_process import GrammarProcess
from headrace_router.core.errors import InvalidRequestError

KEPT = 256  # grammars that are known to be right, of one model
DEEPEST = 64  # arrays and objects in each other, in a schema
_VALUES = ("const", "enum", "default", "examples")  # whose values are no schemas
_FORMATS = (  # formats of JSON Schema: those that the library does not know are refused
    "date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uri",
    "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer", "relative-json-pointer", "regex",
)  # fmt: skip
_COMBINING = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef")
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "minProperties")
# These have precedence over `x-guidance` in a schema, which could ask for less than the whole schema.
_OPTIONS: Any = {
    "whitespace_flexible": True,
    "whitespace_pattern": r"[ \n]{0,2}",
    "lenient": False,
    "coerce_one_of": False,
}


def schema_grammar(schema: Any) -> str:
    """The grammar of a JSON Schema, or of its text. Raises ValueError."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema, parse_constant=_refuse)
        except (ValueError, RecursionError):
            raise ValueError("it is no JSON text, or its nesting is too deep") from None
    if not isinstance(schema, dict):
        raise ValueError("it must be an object; {} allows any JSON value")
    return json.dumps({"grammars": [{"json_schema": prepared_schema(schema)}]})


def _refuse(name: str) -> None:
    raise ValueError(name)


def prepared_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """As a part of a grammar, with the options of all of them. Raises ValueError."""
    _check_depth(schema)
    schema = _without_annotations(schema)
    return {**(schema if _combines(schema) else _closed(schema)), "x-guidance": _OPTIONS}


def _check_depth(schema: Any) -> None:
    """The library would use up its stack. Raises ValueError."""
    level, depth = [schema], 0
    while level:
        depth += 1
        if depth > DEEPEST:
            raise ValueError(f"it is nested deeper than {DEEPEST} levels")
        inner = (part.values() if isinstance(part, dict) else part for part in level)
        level = [member for members in inner for member in members if isinstance(member, dict | list)]


def _without_annotations(schema: Any) -> Any:
    """Without keywords that say nothing about an answer, which the library refuses: `format: password` and the like."""
    if isinstance(schema, list):
        return [_without_annotations(member) for member in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: member if name in _VALUES else _without_annotations(member) for name, member in schema.items()}
    if isinstance(found.get("format"), str) and found["format"] not in _FORMATS:
        del found["format"]
    if found.get("propertyNames") in ({"type": "string"}, {}, True):
        del found["propertyNames"]
    return found


def _closed(schema: Any) -> Any:
    """A schema whose objects with `properties` have no others, unless it says `additionalProperties`.

    A model that has said everything would go on with properties of its own. All of its instances are the schema's.
    """
    if isinstance(schema, list):
        return [_closed(member) for member in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: member if name in _VALUES else _closed(member) for name, member in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.keys().isdisjoint(_OPEN):
        found["additionalProperties"] = False
    return found


def _combines(schema: Any) -> bool:
    """Whether several parts of it may apply to one object, which then has the properties of all."""
    if isinstance(schema, list):
        return any(map(_combines, schema))
    if not isinstance(schema, dict):
        return False
    all_of = schema.get("allOf")
    if isinstance(all_of, list) and (len(all_of) > 1 or "properties" in schema):
        return True
    if "properties" in schema and not schema.keys().isdisjoint(_COMBINING):
        return True
    return any(map(_combines, schema.values()))


def regex_grammar(pattern: str) -> str:
    r"""In the syntax of Rust's regex crate: without look-around and back-references.

    `\d` is a digit from 0 to 9, as in the patterns of schemas: models do write the digits of other scripts.
    """
    grammar: str = LLMatcher.grammar_from_regex(ascii_digits(pattern))
    return grammar


def regex_lark(pattern: str) -> str:
    """The same in Lark's syntax."""
    return str(json.loads(regex_grammar(pattern))["grammars"][0]["lark_grammar"])


def ascii_digits(pattern: str) -> str:
    r"""The pattern with `[0-9]` for each `\d`."""
    in_class = False
    found: list[str] = []
    for part in re.findall(r"\\.|.", pattern, re.DOTALL):
        in_class = part == "[" or (in_class and part != "]")
        found.append(("0-9" if in_class else "[0-9]") if part == r"\d" else part)
    return "".join(found)


def choice_grammar(choices: list[str]) -> str:
    """One of the texts. Raises ValueError."""
    if not choices or not all(choices):
        raise ValueError("it needs at least one text, and none may be empty")
    return regex_grammar("|".join(map(re.escape, choices)))


def text_grammar(text: str) -> str:
    """In Lark's syntax, or in GBNF's, which `GrammarCheck` converts. Raises ValueError."""
    if not text.strip() or text.lstrip().startswith("{"):
        raise ValueError("it is no grammar in the syntax of Lark or GBNF")
    return text


class GrammarCheck:
    """Whether grammars can be followed with a model's tokenizer. Safe to use from several threads."""

    def __init__(self, tokenizer_json: Callable[[], str], vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """tokenizer_json: called when the first grammar is checked."""
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._process: GrammarProcess | None = None
        self._right: OrderedDict[str, str] = OrderedDict()  # by what was asked for
        self._lock = Lock()

    def known(self, grammar: str) -> str:
        """What replicas get for it, if it was found to be right and is one of the latest; else empty."""
        with self._lock:
            if grammar in self._right:
                self._right.move_to_end(grammar)
            return self._right.get(grammar, "")

    def check(self, grammar: str, field: str, seconds: float) -> str:
        """Compiles it and tries beginnings of answers; returns what replicas get for it. Slow: call off the event loop.

        Raises InvalidRequestError.

        seconds: that it may take; those of the first call hold for later ones.
        """
        with self._lock:
            if self._process is None:
                self._process = GrammarProcess(self._tokenizer_json(), self._vocab_size, self._eos_token_ids, seconds)
                weakref.finalize(self, self._process.close)
            process = self._process
        problem, converted = process.check(grammar)
        if problem:
            raise InvalidRequestError(f"'{field}' cannot be followed: {problem}.", param=field)
        with self._lock:
            self._right[grammar] = converted
            if len(self._right) > KEPT:
                self._right.popitem(last=False)
        return converted
