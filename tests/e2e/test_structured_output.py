"""Answers that follow a schema, a pattern, choices or a grammar, by a real model."""

import json
import re
from typing import Any

import httpx
import openai
import pydantic
import pytest

MODEL = "smollm2"
CITY = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "people": {"type": "integer", "maximum": 99999999}},
    "required": ["name", "people"],
    "additionalProperties": False,
}


class City(pydantic.BaseModel):
    name: str
    kind: list[bool] = pydantic.Field(max_length=3)


def _ask(client: openai.OpenAI, **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": "Tell me about Paris."}]
    given: dict[str, Any] = {"model": MODEL, "messages": messages, "temperature": 1, "seed": 1, "max_tokens": 100}
    return client.chat.completions.create(**given | options)


def _schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}


def _text(answer: Any) -> str:
    assert answer.choices[0].finish_reason == "stop"
    return str(answer.choices[0].message.content)


def test_a_schema_is_followed_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = _ask(client, response_format=_schema(CITY), n=2)
    for choice in whole.choices:
        found = json.loads(choice.message.content)
        assert choice.finish_reason == "stop" and set(found) == {"name", "people"} and len(found["name"]) <= 12
    chunks = list(_ask(client, response_format=_schema(CITY), stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content


def test_patterns_choices_and_grammars(client: openai.OpenAI) -> None:
    for field in ("structured_outputs", "guided"):
        for name, value, pattern in (
            ("regex", r"[a-c]{2}-\d{3}", r"[a-c]{2}-\d{3}"),
            ("choice", ["yes (really)", "no"], r"yes \(really\)|no"),
            ("grammar", 'start: "<" /[0-9]{1,4}/ ">"', r"<\d{1,4}>"),
            ("grammar", 'root ::= "<" [0-9] ">"', r"<\d>"),
            ("json", json.dumps({"enum": ["A", 1]}), r'"A"|1'),
        ):
            extra = {field: {name: value}} if field == "structured_outputs" else {f"guided_{name}": value}
            assert re.fullmatch(pattern, _text(_ask(client, extra_body=extra)))


def test_the_parser_of_the_openai_client(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Tell me about Paris."}]
    answer = client.chat.completions.parse(
        model=MODEL, messages=messages, response_format=City, temperature=0, max_tokens=200
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(answer.choices[0].message.parsed, City)


def test_spellings_of_other_servers(client: openai.OpenAI) -> None:
    for kind in ("json_object", "json_schema"):
        found = _text(_ask(client, response_format={"type": kind, "schema": CITY}))
        assert set(json.loads(found)) == {"name", "people"}
    options = {"disable_any_whitespace": False, "disable_additional_properties": False, "whitespace_pattern": None}
    assert _text(_ask(client, extra_body={"structured_outputs": {"choice": ["a"], "json": None} | options})) == "a"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"structured_outputs": {}}, "is empty"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "send one of them"),
        ({"guided_grammar": "root ::= thing"}, "GBNF"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "to be json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"type": "object"}}}, "belongs into"),
        ({"response_format": {"type": "json_object", "value": {}}}, "send the schema as"),
    ],
)
def test_what_cannot_be_followed_is_refused(http: httpx.Client, fields: dict[str, Any], sentence: str) -> None:
    answer = http.post("/v1/completions", json={"model": MODEL, "prompt": "x", **fields})
    assert answer.status_code == 400 and sentence in answer.json()["error"]["message"]
