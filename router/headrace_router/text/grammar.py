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
from llguidance.gbnf_to_lark import any_to_lark

from headrace_router.core.errors import InvalidRequestError
from headrace_router.text.grammar_process import GrammarProcess

KEPT = 256  # grammars that are known to be right, of one model
DEEPEST = 64  # arrays and objects in each other, in a schema
_VALUES = ("const", "enum", "default", "examples")  # whose values are no schemas
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
    """Of a JSON Schema, or its text. Raises ValueError."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise ValueError("it is no JSON text, or its nesting is too deep") from None
    if not isinstance(schema, dict | bool):
        raise ValueError("a JSON Schema is an object")
    if isinstance(schema, dict):
        _check_depth(schema)
        if not _combines(schema):
            schema = _closed(schema)
    grammar: str = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_OPTIONS)
    return grammar


def _check_depth(schema: Any) -> None:
    """The library would use up its stack. Raises ValueError."""
    level, depth = [schema], 0
    while level:
        depth += 1
        if depth > DEEPEST:
            raise ValueError(f"it is nested deeper than {DEEPEST} levels")
        inner = (part.values() if isinstance(part, dict) else part for part in level)
        level = [member for members in inner for member in members if isinstance(member, dict | list)]


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
    """In the syntax of Rust's regex crate: without look-around and back-references."""
    grammar: str = LLMatcher.grammar_from_regex(pattern)
    return grammar


def choice_grammar(choices: list[str]) -> str:
    """One of the texts. Raises ValueError."""
    if not choices or not all(choices):
        raise ValueError("it needs at least one text, and none may be empty")
    return regex_grammar("|".join(map(re.escape, choices)))


def lark_grammar(text: str) -> str:
    """In Lark's or GBNF's syntax. Raises ValueError."""
    grammar: str = LLMatcher.grammar_from_lark(any_to_lark(text))
    return grammar


class GrammarCheck:
    """Whether grammars can be followed with a model's tokenizer. Safe to use from several threads."""

    def __init__(self, tokenizer_json: Callable[[], str], vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """tokenizer_json: called when the first grammar is checked."""
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._process: GrammarProcess | None = None
        self._right: OrderedDict[str, None] = OrderedDict()
        self._lock = Lock()

    def is_known(self, grammar: str) -> bool:
        """Whether it was found to be right; of the latest ones."""
        with self._lock:
            known = grammar in self._right
            if known:
                self._right.move_to_end(grammar)
            return known

    def check(self, grammar: str, field: str, seconds: float) -> None:
        """Compiles it and takes its first mask. Slow: call off the event loop. Raises InvalidRequestError.

        seconds: that it may take; those of the first call hold for later ones.
        """
        with self._lock:
            if self._process is None:
                self._process = GrammarProcess(self._tokenizer_json(), self._vocab_size, self._eos_token_ids, seconds)
                weakref.finalize(self, self._process.close)
            process = self._process
        if problem := process.problem(grammar):
            raise InvalidRequestError(f"'{field}' cannot be followed: {problem}.", param=field)
        with self._lock:
            self._right[grammar] = None
            if len(self._right) > KEPT:
                self._right.popitem(last=False)
