"""Anthropic's Messages API, by its official client, against a replica that answers with a given text."""

import json
import re
from typing import Any

import anthropic
import httpx2
import pytest

from support.router.fake_replica import TOOL_TEMPLATE

WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TIME: Any = {"name": "get_time", "input_schema": {"type": "object"}}
ANSWER = (
    '<think>\nI need "tools".\n</think>\n\nLet me look.\n<tool_call>\n{"name": "get_weather", "arguments": '
    '{"city": "Zürich 🙂"}}\n</tool_call>\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)
ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Zürich?"}]
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}
KEY = "a-key-of-a-tenant"


def _client(harness: Any, **options: Any) -> anthropic.Anthropic:
    http: Any = httpx2.Client(trust_env=False, timeout=20)
    return anthropic.Anthropic(
        **{"base_url": harness.url, "api_key": KEY, "max_retries": 0} | options,
        http_client=http,
        _strict_response_validation=True,
    )


def _start(harness: Any, make_replica: Any, config: Any = None, **options: Any) -> Any:
    replica = make_replica(**{"reply": ANSWER, "chat_template": TOOL_TEMPLATE, "max_model_len": 4096} | options)
    harness.start([replica], **(config or {}))
    return replica


def _content(message: Any) -> list[dict[str, Any]]:
    """The blocks without their ids."""
    return [{name: value for name, value in block.items() if name != "id"} for block in message.to_dict()["content"]]


@pytest.mark.parametrize("tokens", [1, 3, 500])
def test_streamed_is_whole(harness: Any, make_replica: Any, tokens: int) -> None:
    _start(harness, make_replica, tokens_per_delta=tokens)
    given: dict[str, Any] = {"model": "tiny", "max_tokens": 2000, "messages": ASKED, "tools": [WEATHER, TIME]}
    with _client(harness) as client:
        whole = client.messages.create(**given, thinking=THINKING)
        with client.messages.stream(**given, thinking=THINKING) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_message()
    thought, text, weather, time = _content(whole)
    assert thought == {"type": "thinking", "thinking": 'I need "tools".', "signature": "headrace"}
    assert text == {"type": "text", "text": "Let me look."}
    assert weather == {"type": "tool_use", "name": "get_weather", "input": {"city": "Zürich 🙂"}}
    assert time == {"type": "tool_use", "name": "get_time", "input": {}}
    assert whole.stop_reason == streamed.stop_reason == "tool_use" and whole.id.startswith("msg_")
    assert _content(streamed) == _content(whole) and streamed.usage.to_dict() == whole.usage.to_dict()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and kinds.count("content_block_stop") == 4
    usage = whole.usage
    assert usage.cache_read_input_tokens == 3 and usage.input_tokens > 3 and usage.output_tokens > 20


def test_each_event_has_its_name_and_each_block_one_id(harness: Any, make_replica: Any) -> None:
    _start(harness, make_replica)
    body = {"model": "tiny", "max_tokens": 2000, "messages": ASKED, "tools": [WEATHER, TIME], "stream": True}
    with harness.client() as client:
        text = client.post("/v1/messages", json=body).raise_for_status().text
    events = [part.split("\ndata: ") for part in text.strip().split("\n\n")]
    assert all(name == f"event: {json.loads(data)['type']}" for name, data in events)
    found = [json.loads(data) for _, data in events]
    opened = [event["index"] for event in found if event["type"] == "content_block_start"]
    assert opened == [0, 1, 2], "reasoning that was not asked for has no block"
    assert [event["index"] for event in found if event["type"] == "content_block_stop"] == opened
    assert "[DONE]" not in text and [event["type"] for event in found].count("ping") == 1


def test_a_conversation_with_tools_becomes_the_chat(harness: Any, make_replica: Any) -> None:
    replica = _start(harness, make_replica, reply="It is sunny.")
    messages: list[Any] = [
        *ASKED,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Look it up.", "signature": "x"},
                {"type": "text", "text": "One moment."},
                {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Zürich"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "20 degrees"}]},
                {"type": "text", "text": "In one sentence.", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    with _client(harness) as client:
        answer = client.messages.create(
            model="tiny", max_tokens=50, messages=messages, system=system, tools=[WEATHER], stop_sequences=["sunny"]
        )
        counted = client.messages.count_tokens(model="tiny", messages=messages, system=system, tools=[WEATHER])
    prompt = replica.last_prompt
    for part in ("system\nBe brief.", "One moment.", '"name": "get_weather"', "tool\n20 degrees", "In one sentence."):
        assert part in prompt
    assert prompt.index("20 degrees") < prompt.index("In one sentence.")
    assert answer.stop_reason == "stop_sequence" and answer.stop_sequence == "sunny"
    assert _content(answer) == [{"type": "text", "text": "It is "}]
    assert counted.input_tokens == answer.usage.input_tokens + 3


def test_an_answer_that_is_begun_goes_on(harness: Any, make_replica: Any) -> None:
    replica = _start(harness, make_replica, reply=" blue")
    with _client(harness) as client:
        begun: list[Any] = [*ASKED, {"role": "assistant", "content": "The sky is"}]
        answer = client.messages.create(model="tiny", max_tokens=50, messages=begun)
    assert replica.last_prompt.endswith("The sky is") and _content(answer)[0]["text"] == " blue"
    assert answer.stop_reason == "end_turn"


@pytest.mark.parametrize("header", ["x-api-key", "authorization"])
def test_keys_and_errors_have_the_form_of_this_api(harness: Any, make_replica: Any, header: str) -> None:
    _start(harness, make_replica, {"auth": {"keys": [KEY]}}, reply="hi")
    own = {"auth_token": KEY, "api_key": None} if header == "authorization" else {"api_key": KEY}
    with _client(harness, **own) as client:
        assert client.messages.create(model="tiny", max_tokens=5, messages=ASKED).content
        with pytest.raises(anthropic.NotFoundError) as missing:
            client.messages.create(model="none", max_tokens=5, messages=ASKED)
    body: Any = missing.value.body
    assert body["type"] == "error" and body["error"]["type"] == "not_found_error" and body["request_id"]
    with _client(harness, api_key="another key") as client, pytest.raises(anthropic.AuthenticationError) as refused:
        client.messages.create(model="tiny", max_tokens=5, messages=ASKED)
    body = refused.value.body
    assert body["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": None}, "'max_tokens' is required."),
        ({"max_tokens": 0}, "'max_tokens' is not valid"),
        ({"stop": ["x"]}, "'stop' is no field of this API; send 'stop_sequences'"),
        ({"seed": 7}, "'seed' is no field of this API."),
        ({"tool_choice": {"type": "any"}}, "'tool_choice' needs a tool"),
        ({"mcp_servers": [{"url": "x"}]}, "'mcp_servers' is not supported"),
        ({"tool_choice": {"type": "tool"}, "tools": [WEATHER]}, "'tool_choice.name' is required"),
        ({"tool_choice": {"type": "tool", "name": "other"}, "tools": [WEATHER]}, "'other', which is not in 'tools'"),
        ({"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "b"}]}]},
            "names no 'tool_use' of an earlier message",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "'image' are not supported: this server reads and answers text only",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, "has the type 'hologram'"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "'messages[0].content[0].type' is required"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]}, "needs 'id', 'name'"),
    ],
)
def test_mistakes_are_one_sentence(shared: Any, fields: dict[str, Any], said: str) -> None:
    body = {"model": "tiny", "max_tokens": 5, "messages": ASKED} | fields
    with shared.client() as client:
        answer = client.post("/v1/messages", json=body)
    error = answer.json()
    assert answer.status_code == 400 and error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error" and said in error["error"]["message"], error


def test_what_is_left_out_is_named_in_a_header(shared: Any) -> None:
    body = {
        "model": "tiny",
        "max_tokens": 5,
        "messages": ASKED,
        "tools": [{"type": "web_search_20250305", "name": "web_search"}],
        "tool_choice": {"type": "auto"},
        "context_management": {"edits": []},
        "thinking": THINKING,
        "metadata": {"user_id": "me"},
    }
    with shared.client() as client:
        answer = client.post("/v1/messages?beta=true", json=body, headers={"anthropic-version": "2023-06-01"})
    assert answer.status_code == 200, answer.text
    named = answer.headers["x-headrace-ignored-fields"].split(", ")
    assert sorted(named) == ["context_management", "max_reasoning_tokens", "tools[0].web_search_20250305"]


def test_a_budget_of_thinking_that_cannot_be_enforced_is_named(harness: Any, make_replica: Any) -> None:
    """The tokenizer of this model has no token that ends the reasoning."""
    replica = _start(harness, make_replica)
    body = {"model": "tiny", "max_tokens": 2000, "messages": ASKED, "thinking": THINKING}
    for stream in (False, True):
        with harness.client() as client:
            answer = client.post("/v1/messages", json=body | {"stream": stream})
        assert answer.headers["x-headrace-ignored-fields"] == "max_reasoning_tokens" and not replica.submits[-1].grammar


def test_a_stream_that_fails_ends_with_an_error_event(harness: Any, make_replica: Any) -> None:
    _start(harness, make_replica, reply="one two three four", end_with_error=True)
    body = {"model": "tiny", "max_tokens": 50, "messages": ASKED, "stream": True}
    with harness.client() as client:
        *_, last = client.post("/v1/messages", json=body).text.strip().split("\n\n")
    assert last.startswith("event: error\n") and '"type":"api_error"' in last


def test_the_text_may_follow_a_schema(harness: Any, make_replica: Any) -> None:
    replica = _start(harness, make_replica, reply="{}")
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    wanted = {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
    body = {"model": "tiny", "max_tokens": 50, "messages": ASKED}
    with harness.client() as client:
        for fields in ({"output_config": wanted}, {"output_format": wanted["format"]}):
            answer = client.post("/v1/messages", json=body | fields)
            assert answer.status_code == 200 and "x-headrace-ignored-fields" not in answer.headers, answer.text
            assert '"integer"' in replica.submits[-1].grammar
        faulty = {"output_format": {"type": "json_schema", "schema": {"type": "no such type"}}}
        error = client.post("/v1/messages", json=body | faulty).json()["error"]
    assert "'output_config.format'" in error["message"]


def test_a_prompt_that_is_too_long_is_said_in_words_that_clients_read(shared: Any) -> None:
    """Claude Code shortens the conversation then, and goes on."""
    body = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "word " * 400}]}
    with shared.client() as client:
        error = client.post("/v1/messages", json=body).json()["error"]
    assert re.fullmatch(r"prompt is too long: \d+ tokens > 255 maximum", error["message"]), error


def test_a_conversation_that_began_elsewhere_goes_on(harness: Any, make_replica: Any) -> None:
    """Calls of a provider's own tools are left out, and an image in a result is told of; both are named."""
    replica = _start(harness, make_replica, reply="hi")
    search = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
    found = {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    messages = [
        *ASKED,
        {"role": "assistant", "content": [search, found, {"type": "text", "text": "I look."}, call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [image]}]},
    ]
    with harness.client() as client:
        answer = client.post("/v1/messages", json={"model": "tiny", "max_tokens": 5, "messages": messages})
    assert answer.status_code == 200, answer.text
    named = answer.headers["x-headrace-ignored-fields"]
    for part in ("server_tool_use", "web_search_tool_result", "messages[2].content[0].content[0].image"):
        assert part in named
    assert "[image: only text can be read here]" in replica.last_prompt and "I look." in replica.last_prompt
