"""Schemas and grammars that only their trial shows to be wrong: no end, no names left, numbers that are not exact."""

import json
from typing import Any

import pytest

from headrace_proto.grammar import GrammarError, compile_grammar, grammar_tokenizer
from headrace_router.answer.grammar import schema_grammar
from headrace_router.answer.grammar_process import Trial
from headrace_worker.model.gguf_tokenizer import byte_tokenizer

BYTES = byte_tokenizer(300)
TOKENIZER = grammar_tokenizer(BYTES.to_str(), 300, [2])
TRIAL = Trial(TOKENIZER)
SECONDS = 60.0
BIG = 2**53 + 1
A: Any = {"$ref": "#/$defs/a"}
INTEGER: Any = {"type": "integer"}


def _object(properties: dict[str, Any], required: str = "", **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required.split(), **more}


def _with_a(a: Any, schema: Any = A) -> dict[str, Any]:
    return {**schema, "$defs": {"a": a, "b": _object({"a": A}, "a")}}


def _score(pattern: str, required: str = "score", **more: Any) -> dict[str, Any]:
    """An object with the property `score`, and others whose names match the pattern."""
    more = {"patternProperties": {pattern: INTEGER}, "additionalProperties": False, **more}
    return _object({"score": INTEGER}, required, **more)


_SCORES = {"type": "object", "patternProperties": {"^score$": INTEGER}, "additionalProperties": False}


def _allows(grammar: str, text: str) -> bool:
    matcher = compile_grammar(TOKENIZER, grammar)
    ids = BYTES.encode(text, add_special_tokens=False).ids
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize(
    "schema",
    [
        _with_a(_object({"n": A}, "n")),
        _object({"n": {"$ref": "#"}}, "n"),
        _with_a(_object({"b": {"$ref": "#/$defs/b"}}, "b")),
        _with_a({"type": "array", "items": {"$ref": "#/$defs/b"}, "minItems": 1}),
        _with_a({"anyOf": [_object({"n": A}, "n"), {"type": "array", "prefixItems": [A], "minItems": 1}]}),
        _with_a({"allOf": [_object({"n": A}, "n"), {"type": "object"}]}),
        _with_a({"oneOf": [A, {"allOf": [A]}]}),
        _with_a(_object({"n": A}, "n"), _object({"list": {"type": "array", "items": A, "minItems": 2}}, "list")),
        {"type": "object", "additionalProperties": {"$ref": "#"}, "minProperties": 1},
        {
            "type": ["object", "array"],
            "items": {"$ref": "#"},
            "minItems": 1,
            **_object({"n": {"$ref": "#/items"}}, "n"),
        },
        A | {"$defs": {"a": A}},
    ],
)
def test_a_schema_that_requires_itself_is_refused(schema: Any) -> None:
    with pytest.raises(GrammarError, match=r"no value of it has an end: '#.*' requires itself"):
        TRIAL.run(schema_grammar(schema), SECONDS)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (_with_a(_object({"n": A})), '{"n":{"n":{}}}'),
        (_with_a(_object({"n": {"anyOf": [A, {"type": "null"}]}}, "n")), '{"n":{"n":null}}'),
        (_with_a(_object({"n": {"type": "array", "items": A}}, "n")), '{"n":[{"n":[]}]}'),
        (_with_a(_object({"n": A}, "n", type=["object", "string"])), '{"n":"x"}'),
        (_with_a({"enum": [1]}, {"type": "array", "items": A, "minItems": 2}), "[1,1]"),
        ({"type": "object", "additionalProperties": {"$ref": "#"}}, '{"x":{}}'),
        ({"$ref": "#/a~1b/0", "a/b": [INTEGER]}, "12"),
    ],
)
def test_a_schema_that_may_contain_itself_is_followed(schema: Any, text: str) -> None:
    assert _allows(TRIAL.run(schema_grammar(schema), SECONDS), text)


def test_an_answer_does_not_enter_a_part_without_end() -> None:
    endless = _object({"n": A}, "n")
    grammar = TRIAL.run(schema_grammar(_with_a(endless, _object({"a": A, "b": INTEGER}))), SECONDS)
    assert _allows(grammar, '{"b":1}') and not compile_grammar(TOKENIZER, grammar).try_consume_tokens(
        BYTES.encode('{"a"', add_special_tokens=False).ids
    ) > len('{"')
    grammar = TRIAL.run(schema_grammar(_with_a(endless, {"anyOf": [A, INTEGER]})), SECONDS)
    assert _allows(grammar, "1") and not compile_grammar(TOKENIZER, grammar).try_consume_tokens([ord("{")])


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (_score("^score$"), ""),
        (_score("^(score)$", ""), ""),
        (_object({"list": {"type": "array", "items": _score("^score$")}}), "properties.list.items."),
        (_with_a(_score("^score$"), {"anyOf": [A, INTEGER]}), r"\$defs.a."),
    ],
)
def test_patterns_that_leave_no_name_are_refused(schema: Any, place: str) -> None:
    with pytest.raises(GrammarError, match=rf"'{place}patternProperties' has no name that 'properties' does not have"):
        TRIAL.run(schema_grammar(schema), SECONDS)


def test_patterns_that_leave_names_are_followed() -> None:
    for schema in (_score("^x-"), _score("^s"), _score("^score$", additionalProperties=True)):
        assert _allows(TRIAL.run(schema_grammar(schema), SECONDS), '{"score":1}')
    assert _allows(TRIAL.run(schema_grammar(_score("^s")), SECONDS), '{"score":1,"s":2}')
    small = _score("^s", patternProperties={"^s": {"maximum": 5, "type": "integer"}})
    assert not _allows(TRIAL.run(schema_grammar(small), SECONDS), '{"score":6}')


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a" ("," b)?\nb: C\nC: /x/ & /y/',
        'start: "[" (item ("," item)*)? "]"\nitem: "1" | "{" C "}"\nC: /[0-9]+/ & /[a-z]+/',
        schema_grammar({"allOf": [_object({"score": INTEGER}, "score"), _SCORES]}),
    ],
)
def test_a_dead_end_behind_the_first_token_is_found(grammar: str) -> None:
    with pytest.raises(GrammarError, match="to where nothing may follow"):
        TRIAL.run(grammar, SECONDS)


@pytest.mark.parametrize("grammar", ['start: "a"', 'start: /[a-z]+/ "é"', 'start: "%json {" /a+/', 'start: <[5]> "b"?'])
def test_grammars_without_a_dead_end_are_unchanged(grammar: str) -> None:
    assert TRIAL.run(grammar, SECONDS) == grammar


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"const": BIG}, "const"),
        ({"enum": ["a", {"x": [1, -BIG]}]}, r"enum\[1\].x\[1\]"),
        (_object({"id": INTEGER | {"minimum": BIG}}), "properties.id.minimum"),
        (
            _object({"id": {"type": "array", "items": {"exclusiveMaximum": -BIG}}}),
            "properties.id.items.exclusiveMaximum",
        ),
        (_object({"default": {"anyOf": [INTEGER, {"maximum": -BIG}]}}), r"properties.default.anyOf\[1\].maximum"),
        (_with_a({"multipleOf": BIG}), r"\$defs.a.multipleOf"),
        (INTEGER | {"exclusiveMinimum": BIG}, "exclusiveMinimum"),
        ({"type": "string", "maxLength": BIG}, "maxLength"),
        ({"const": -(2**63)}, "const"),
        ({"const": 10**400}, "const"),
        ({"enum": [{"maximum": BIG}]}, r"enum\[0\].maximum"),
        ('{"const": 1e400}', "const"),
    ],
)
def test_numbers_that_are_not_exact_are_refused(schema: Any, place: str) -> None:
    with pytest.raises(GrammarError, match=rf"'{place}' is .*, and numbers beyond 9007199254740991 .* are not exact"):
        TRIAL.run(schema_grammar(schema), SECONDS)
    lark = f'start: "a" %json {schema if isinstance(schema, str) else json.dumps(schema)}'
    with pytest.raises(GrammarError, match=f"'{place}' is "):
        TRIAL.run(lark, SECONDS)


@pytest.mark.parametrize(
    ("multiple", "reason"),
    [
        (0, "must be above 0"),
        (-1, "must be above 0"),
        (0.0, "must be above 0"),
        (10**9, "too many digits"),
        (1 / 3, "too many digits"),
    ],
)
def test_steps_that_cannot_be_followed_are_refused(multiple: float, reason: str) -> None:
    with pytest.raises(GrammarError, match=rf"'multipleOf' is .*{reason}"):
        TRIAL.run(schema_grammar({"type": "number", "multipleOf": multiple}), SECONDS)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"const": 0.1}, "0.1"),
        ({"enum": [2**53 - 1, 1.5]}, "9007199254740991"),
        (INTEGER | {"minimum": -(2**53) + 1, "maximum": 2**53 - 1}, "-9007199254740991"),
        (INTEGER | {"default": BIG, "examples": [BIG]}, "5"),
        (_object({"minimum": {"const": "x"}}, x=BIG), '{"minimum":"x"}'),
        (INTEGER | {"exclusiveMinimum": True, "minimum": 3}, "4"),
        ({"type": "number", "multipleOf": 0.01, "maximum": 0.3}, "0.29"),
    ],
)
def test_other_numbers_are_followed(schema: Any, text: str) -> None:
    assert _allows(TRIAL.run(schema_grammar(schema), SECONDS), text)


@pytest.mark.parametrize(
    ("bounds", "right", "wrong"),
    [
        ({"minimum": 0, "maximum": 2**63 - 1}, [0, 2**60 + 1, 2**63 - 2**10], [-1, 2**63, 10**30]),
        ({"minimum": -(2**63), "maximum": 2**64 - 1}, [-(2**62) - 1, 2**62 + 1], [-(2**63) - 1, 2**64]),
        ({"exclusiveMaximum": 1e300, "minimum": -1e300}, [2**62 + 1, -5], []),
        ({"maximum": BIG}, [2**53 - 2**10], [BIG + 1]),
    ],
)
def test_bounds_of_64_bits_are_kept(bounds: dict[str, Any], right: list[int], wrong: list[int]) -> None:
    """As generators of schemas write them: the largest values may be left out, and no wrong one is written."""
    grammar = TRIAL.run(schema_grammar(INTEGER | bounds), SECONDS)
    assert all(_allows(grammar, str(number)) for number in right)
    assert not any(_allows(grammar, str(number)) for number in wrong)


def _format(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def _tool(schema: Any) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    return {"tools": [tool], "tool_choice": "required"}


CHOICES = "must be none, auto, required"


@pytest.mark.parametrize(
    ("fields", "param", "sentence"),
    [
        (_format(_score("^score$")), "response_format", "'patternProperties' has no name"),
        (_tool(_score("^score$")), "", "'patternProperties' has no name"),
        (_format(_with_a(_object({"n": A}, "n"))), "response_format", "'#/$defs/a' requires itself"),
        (_format(_object({"id": {"const": BIG}})), "response_format", f"'properties.id.const' is {BIG}"),
        (_tool(_object({"id": {"enum": [BIG]}})), "", f"enum[0]' is {BIG}"),
        (_format({"multipleOf": 0}), "response_format", "'multipleOf' is 0, and must be above 0"),
        (_format(True), "response_format.json_schema.schema", "must be an object"),
        (_format([1, 2]), "response_format.json_schema.schema", "must be an object"),
        ({"response_format": {"type": "json_object", "schema": True}}, "response_format.schema", "must be an object"),
        ({"guided_json": False}, "guided_json", "must be an object"),
        ({"guided_json": "true"}, "guided_json", "must be an object; {} allows any JSON value."),
        ({"structured_outputs": {"json": "[1, 2]"}}, "structured_outputs.json", "must be an object"),
        (_tool(True), "tools[0].function.parameters", "must be an object"),
        ({"tools": _tool({})["tools"], "tool_choice": "any"}, "tool_choice", CHOICES),
        ({"tools": _tool({})["tools"], "tool_choice": {"type": "any"}}, "tool_choice", CHOICES),
        ({"tools": _tool({})["tools"], "tool_choice": ["f"]}, "tool_choice", CHOICES),
    ],
)
def test_what_cannot_be_followed_reaches_no_replica(
    harness: Any, make_replica: Any, fields: dict[str, Any], param: str, sentence: str
) -> None:
    """param: empty where it names a tool or a part of one."""
    replica = make_replica(max_model_len=4096)
    harness.start([replica])
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], **fields}
    with harness.client() as client:
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400 and not replica.submits
        error = answer.json()["error"]
        assert sentence in error["message"] and (error["param"] == param or (not param and "tools" in error["param"]))
        streamed = client.post("/v1/chat/completions", json=body | {"stream": True})
        assert streamed.status_code == 400 and streamed.json()["error"]["message"] == error["message"]


def test_schemas_that_are_true_or_false_are_followed_in_others(harness: Any, make_replica: Any) -> None:
    harness.start([make_replica(max_model_len=4096)])
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    schema = _object({"any": True, "none": False}, "any")
    with harness.client() as client:
        for fields in (_format(schema), _tool(schema), _format({})):
            client.post("/v1/chat/completions", json=body | fields).raise_for_status()
