"""The table of fields: each row states the behaviour, and the page that is generated from it is current."""

from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import (
    chat_completion_assistant_message_param,
    chat_completion_content_part_text_param,
    chat_completion_stream_options_param,
    chat_completion_tool_message_param,
    chat_completion_user_message_param,
)
from openai.types.chat import completion_create_params as chat_create_params

from headrace_router.core.errors import InvalidRequestError, UnsupportedError
from headrace_router.core.limits import Limits
from headrace_router.validation.api_page import api_page
from headrace_router.validation.bodies import ChatBody, CompletionBody
from headrace_router.validation.body_errors import MAX_NAME_CHARS, MAX_NAMES, IgnoredFields, parse_body
from headrace_router.validation.field_table import HONOURED, RESTRICTED, RestrictedField, Scope, same_json

ROOT = Path(__file__).parents[2]
ROWS = [(scope, row) for scope in Scope for row in RESTRICTED[scope].values()]
SAMPLES: list[Any] = [True, False, 7, 0.5, "x", "", [1], [], {"a": 1}, {}]  # of every kind, several values
HEADER = "x-headrace-ignored-fields"

# As sglang-router 0.3.2 sends them for a chat and a completion that set none of these.
SGLANG_CHAT = {
    "logprobs": False,
    "stream": False,
    "no_stop_trim": False,
    "ignore_eos": False,
    "continue_final_message": False,
    "skip_special_tokens": True,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "return_hidden_states": False,
}
SGLANG_COMPLETION = {
    "stream": False,
    "echo": False,
    "no_stop_trim": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "return_hidden_states": False,
}


def _body(scope: Scope, **fields: Any) -> dict[str, Any]:
    """A valid body with these fields in this scope."""
    if scope is Scope.COMPLETIONS:
        return {"model": "tiny", "prompt": "hi", "max_tokens": 2, **fields}
    part = {"type": "text", "text": "hi", **(fields if scope is Scope.PART else {})}
    message = {"role": "user", "content": [part], **(fields if scope is Scope.MESSAGE else {})}
    body: dict[str, Any] = {"model": "tiny", "messages": [message], "max_tokens": 2}
    if scope is Scope.STREAM_OPTIONS:
        return body | {"stream": True, "stream_options": {"include_usage": True, **fields}}
    return body | (fields if scope is Scope.CHAT else {})


def _path(scope: Scope, name: str) -> str:
    """The path of the field of `_body` in errors."""
    before = {
        Scope.STREAM_OPTIONS: "stream_options.",
        Scope.MESSAGE: "messages[0].",
        Scope.PART: "messages[0].content[0].",
    }
    return before.get(scope, "") + name


def _parse(scope: Scope, ignored: IgnoredFields | None = None, **fields: Any) -> ChatBody | CompletionBody:
    body = _body(scope, **fields)
    if scope is Scope.COMPLETIONS:
        return parse_body(CompletionBody, body, Limits(), ignored)
    return parse_body(ChatBody, body, Limits(), ignored)


def _ids(entry: Any) -> str:
    return entry.value if isinstance(entry, Scope) else entry.name


@pytest.mark.parametrize(("scope", "row"), ROWS, ids=_ids)
def test_each_row_states_the_behaviour(scope: Scope, row: RestrictedField) -> None:
    plain = _parse(scope)
    assert _parse(scope, **{row.name: None}) == plain
    for value in row.accepts or ():
        assert row.kind.fits(value) and _parse(scope, **{row.name: value}) == plain
    for value in SAMPLES:
        harmless = row.kind.fits(value) if row.accepts is None else any(same_json(value, one) for one in row.accepts)
        if harmless:
            assert _parse(scope, **{row.name: value}) == plain
            continue
        with pytest.raises(InvalidRequestError) as refusal:
            _parse(scope, **{row.name: value})
        assert refusal.value.param == _path(scope, row.name) and row.name in refusal.value.message
        wrong_kind = row.accepts != () and not row.kind.fits(value)
        assert refusal.value.code == ("invalid_value" if wrong_kind else "unsupported_parameter")
        assert isinstance(refusal.value, UnsupportedError) != wrong_kind


@pytest.mark.parametrize("scope", Scope, ids=_ids)
def test_each_field_is_declared_once(scope: Scope) -> None:
    assert not HONOURED[scope] & RESTRICTED[scope].keys()


def test_the_fields_of_the_installed_openai_client_are_known() -> None:
    chat = chat_create_params.CompletionCreateParamsBase.__annotations__.keys()
    completion = completion_create_params.CompletionCreateParamsBase.__annotations__.keys()
    assert len(chat) > 30 and len(completion) > 12
    messages = (
        chat_completion_user_message_param.ChatCompletionUserMessageParam,
        chat_completion_assistant_message_param.ChatCompletionAssistantMessageParam,
        chat_completion_tool_message_param.ChatCompletionToolMessageParam,
    )
    known = {
        Scope.CHAT: chat,
        Scope.COMPLETIONS: completion,
        Scope.STREAM_OPTIONS: (
            chat_completion_stream_options_param.ChatCompletionStreamOptionsParam.__annotations__.keys()
        ),
        Scope.MESSAGE: {name for one in messages for name in one.__annotations__},
        Scope.PART: chat_completion_content_part_text_param.ChatCompletionContentPartTextParam.__annotations__.keys(),
    }
    for scope, names in known.items():
        assert not set(names) - HONOURED[scope] - RESTRICTED[scope].keys()


def test_the_page_is_current() -> None:
    assert (ROOT / "docs/api.md").read_text() == api_page(), (
        "run: python -m headrace_router.validation.api_page > docs/api.md"
    )


@pytest.mark.parametrize("stream", [False, True])
def test_fields_that_gateways_add_change_nothing(shared: Any, expected_reply: str, stream: bool) -> None:
    replayed = {"role": "assistant", "content": "hi", "provider_specific_fields": {"refusal": None}, "tool_calls": []}
    cached = {"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}
    chat = {
        "model": "tiny",
        "messages": [{"role": "system", "content": [cached]}, replayed, {"role": "user", "content": "hi"}],
        **SGLANG_CHAT,
        "top_logprobs": 0,
        "stream": stream,
    }
    headers = {"OpenAI-Organization": "org", "OpenAI-Project": "p", "X-Stainless-Lang": "python"}
    with shared.client(headers=headers) as client:
        answer = client.post("/v1/chat/completions?api-version=2024-10-21&timeout=5", json=chat)
        assert answer.status_code == 200, answer.text
        assert HEADER not in answer.headers
        if not stream:
            assert answer.json()["choices"][0]["message"]["content"] == expected_reply
        completion = {"model": "tiny", "prompt": "hi", **SGLANG_COMPLETION, "stream": stream}
        assert client.post("/v1/completions", json=completion).status_code == 200


@pytest.mark.parametrize("scope", Scope, ids=_ids)
def test_an_unknown_field_is_refused_by_its_path(shared: Any, scope: Scope) -> None:
    route = "/v1/completions" if scope is Scope.COMPLETIONS else "/v1/chat/completions"
    with shared.client() as client:
        answer = client.post(route, json=_body(scope, quantum=1))
        assert client.post(route, json=_body(scope, quantum=None)).status_code == 200
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "unknown_parameter")
    assert error["param"] == _path(scope, "quantum") and "quantum" in error["message"]
    assert HEADER not in answer.headers


def test_unknown_fields_are_ignored_and_named(harness: Any, make_replica: Any, expected_reply: str) -> None:
    harness.start([make_replica()], unknown_fields="ignore")
    names = {
        Scope.CHAT: "quantum",
        Scope.COMPLETIONS: "quantum",
        Scope.STREAM_OPTIONS: "stream_options.quantum",
        Scope.MESSAGE: "messages[].quantum",
        Scope.PART: "messages[].content[].quantum",
    }
    with harness.client() as client:
        for scope, name in names.items():
            route = "/v1/completions" if scope is Scope.COMPLETIONS else "/v1/chat/completions"
            answer = client.post(route, json=_body(scope, quantum={"a": [1]}))
            assert answer.status_code == 200, answer.text
            assert answer.headers[HEADER] == name
            assert HEADER not in client.post(route, json=_body(scope)).headers
        # A field that would change the answer is still refused.
        answer = client.post("/v1/chat/completions", json=_body(Scope.CHAT, quantum=1, enable_thinking=True))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "enable_thinking")
        # A client's text can neither end the header nor make it long.
        hostile = {f"name{number}\r\nset-cookie: a=b; é🙂 {'x' * 200}": number for number in range(40)}
        answer = client.post("/v1/chat/completions", json=_body(Scope.CHAT, **hostile))
        assert answer.status_code == 200 and "set-cookie" not in answer.headers
        listed = answer.headers[HEADER].split(", ")
        assert len(listed) == MAX_NAMES + 1 and listed[-1] == "..." and listed[0].startswith("name0__set-cookie__a_b__")
        assert all(len(name) <= MAX_NAME_CHARS for name in listed)


@pytest.mark.parametrize("scope", Scope, ids=_ids)
def test_the_fields_of_each_object_are_counted(scope: Scope) -> None:
    many = {f"field{number}": number for number in range(scope.max_fields + 1)}
    with pytest.raises(InvalidRequestError, match=f"the limit is {scope.max_fields}"):
        _parse(scope, IgnoredFields(), **many)


def test_messages_and_parts_are_counted_before_they_are_read() -> None:
    limits = Limits(messages=3, content_parts=5)
    good = {"role": "user", "content": [{"type": "text", "text": "x"}]}
    assert parse_body(ChatBody, {"model": "tiny", "messages": [good] * 3}, limits)
    for messages in ([good] * 4, [good, {"role": "user", "content": [{}] * 5}]):
        with pytest.raises(InvalidRequestError, match="the limit is"):
            parse_body(ChatBody, {"model": "tiny", "messages": messages}, limits)
