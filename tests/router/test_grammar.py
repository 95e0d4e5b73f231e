"""Constraints as grammars: what is refused, and that a grammar without an end costs one process."""

from typing import Any

import pytest

from headrace_proto.grammar import compile_grammar, grammar_tokenizer
from headrace_router.answer.grammar import GrammarCheck, choice_grammar, regex_grammar, schema_grammar, text_grammar
from headrace_router.answer.grammar_process import TOO_LONG
from headrace_router.core.errors import InvalidRequestError
from headrace_worker.model.gguf_tokenizer import byte_tokenizer

ENDLESS = schema_grammar({"allOf": [{"type": "string", "pattern": f"a.{{{count}}}b"} for count in range(300)]})


@pytest.fixture
def check() -> Any:
    return GrammarCheck(byte_tokenizer(300).to_str, 300, [2])


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (schema_grammar({"type": "nothing"}), "nothing"),
        (schema_grammar({"enum": []}), ""),
        (schema_grammar({"not": {}}), "not"),
        (regex_grammar("(a"), "regex"),
        (regex_grammar("a(?=b)"), "look-around"),
        (text_grammar("start: other"), "other"),
        (text_grammar("start: start"), ""),
        (text_grammar("hello"), ""),
        (text_grammar('root = "a"'), ""),
        (text_grammar("root ::= thing"), "GBNF"),
        (text_grammar('root ::= ("a"'), "GBNF"),
        (text_grammar('foo ::= "a"'), "GBNF"),
        (text_grammar("root ::= " + "(" * 30_000), "GBNF|too long"),
        (regex_grammar("(a)\\1"), "backreferences"),
        (schema_grammar({"type": "string", "pattern": "^(?!a)b"}), "look-around"),
        (schema_grammar({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "Use anyOf"),
        (schema_grammar({"type": "string", "format": "regex"}), "regex"),
    ],
)
def test_what_cannot_be_followed_is_named(check: GrammarCheck, grammar: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"'x' cannot be followed: .*{reason}") as raised:
        check.check(grammar, "x", 10)
    assert raised.value.param == "x" and not check.known(grammar)


def test_an_endless_grammar_is_given_up_and_others_go_on(check: GrammarCheck) -> None:
    right = choice_grammar(["a|b", "(c)"])
    check.check(right, "x", 0.5)
    with pytest.raises(InvalidRequestError, match=TOO_LONG):
        check.check(ENDLESS, "x", 0.5)
    assert check.known(right) and not check.known(ENDLESS)
    check.check(regex_grammar("[a-z]+"), "x", 0.5)


@pytest.mark.parametrize(
    "schema", ['{"properties": {"a": ' * 70 + "{}" + "}}" * 70, "[" * 100_000, '{"type":', "5", [1]]
)
def test_a_text_that_is_no_schema_is_refused(schema: Any) -> None:
    with pytest.raises(ValueError, match=r"nest|object"):
        schema_grammar(schema)


def _allows(schema: Any, text: str) -> bool:
    tokenizer = byte_tokenizer(300)
    matcher = compile_grammar(grammar_tokenizer(tokenizer.to_str(), 300, [2]), schema_grammar(schema))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def test_objects_have_the_properties_of_their_schema_alone() -> None:
    number = {"type": "integer"}
    plain = {"type": "object", "properties": {"a": number}}
    assert _allows(plain, '{"a": 1}') and not _allows(plain, '{"a": 1, "b": 2}')
    assert _allows(plain | {"additionalProperties": True}, '{"a": 1, "b": 2}')
    nested = {"$ref": "#/$defs/x", "$defs": {"x": {"type": "array", "items": {"anyOf": [plain, {"type": "null"}]}}}}
    assert _allows(nested, '[{"a": 1}, null]') and not _allows(nested, '[{"b": 1}]')
    both = {"allOf": [plain, {"type": "object", "properties": {"b": number}, "required": ["b"]}]}
    assert _allows(both, '{"a": 1, "b": 2}')
    assert _allows({"const": {"properties": {"a": 1}}}, '{"properties": {"a": 1}}')
    named = {"type": "object", "properties": {"properties": plain, "enum": plain}}
    assert _allows(named, '{"properties": {"a": 1}}') and not _allows(named, '{"properties": {"b": 1}}')


def test_lark_and_gbnf(check: GrammarCheck) -> None:
    lark = '?start: "a" | b\nb: "c"'
    assert check.check(lark, "x", 10) == check.known(lark) == lark
    assert "::=" not in check.check('root ::= "a" | b\nb ::= [0-9]{2}', "x", 10)
    for wrong in ("", "  ", '{"grammars": []}'):
        with pytest.raises(ValueError, match="no grammar"):
            text_grammar(wrong)


def test_digits_are_those_of_ascii() -> None:
    tokenizer = byte_tokenizer(300)
    matcher = compile_grammar(grammar_tokenizer(tokenizer.to_str(), 300, [2]), regex_grammar(r"\d[\d.]\\d\[\d"))
    for text, right in ((r"12\d[3", True), (r"1.\d[0", True), ("٣٤", False)):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        copy = matcher.deep_copy()
        assert (copy.try_consume_tokens(ids) == len(ids) and copy.is_accepting()) == right
