"""Ollama's API, by its official client, against a replica that answers with a given text."""

import json
from typing import Any

import ollama
import pytest

from support.router.fake_replica import TOOL_TEMPLATE

KEY = "a-key"
ANSWER = (
    '<think>\nI need "tools".\n</think>\n\nLet me look.\n<tool_call>\n{"name": "get_weather", "arguments": '
    '{"city": "Zürich 🙂"}}\n</tool_call>\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME: Any = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}
ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Zürich?"}]


def _client(harness: Any) -> ollama.Client:
    return ollama.Client(harness.url, headers={"authorization": f"Bearer {KEY}"}, trust_env=False)


def _start(harness: Any, make_replica: Any, **options: Any) -> Any:
    replica = make_replica(**{"reply": ANSWER, "chat_template": TOOL_TEMPLATE, "max_model_len": 4096} | options)
    harness.start([replica])
    return replica


@pytest.mark.parametrize("tokens", [1, 500])
def test_a_chat_with_tools_streamed_and_whole(harness: Any, make_replica: Any, tokens: int) -> None:
    _start(harness, make_replica, tokens_per_delta=tokens)
    client = _client(harness)
    whole = client.chat("tiny", ASKED, tools=[WEATHER, TIME], think=True)
    parts = [*client.chat("tiny", ASKED, tools=[WEATHER, TIME], think=True, stream=True)]
    message = whole.message
    assert message.thinking == 'I need "tools".' and message.content == "Let me look."
    calls = [(call.function.name, dict(call.function.arguments)) for call in message.tool_calls or ()]
    assert calls == [("get_weather", {"city": "Zürich 🙂"}), ("get_time", {})]
    assert "".join(part.message.content or "" for part in parts) == message.content
    assert "".join(part.message.thinking or "" for part in parts) == message.thinking
    assert [call for part in parts for call in part.message.tool_calls or ()] == message.tool_calls
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    for last in (whole, parts[-1]):
        assert last.done_reason == "stop" and last.model == "tiny"
        assert (last.prompt_eval_count or 0) > 10 and (last.eval_count or 0) > 20
        assert (last.total_duration or 0) >= (last.eval_duration or 0)


def test_a_conversation_becomes_the_chat(harness: Any, make_replica: Any) -> None:
    """Results of tools belong to calls by the name of the tool, or in their order."""
    replica = _start(harness, make_replica, reply="hi")
    calls = [{"function": {"name": name, "arguments": {"city": "Bern"}}} for name in ("get_weather", "get_time")]
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        *ASKED,
        {"role": "assistant", "content": "", "thinking": "Look it up.", "tool_calls": calls},
        {"role": "tool", "content": "noon", "tool_name": "get_time"},
        {"role": "tool", "content": "20 degrees"},
    ]
    options = {"temperature": 0, "num_predict": 5, "num_ctx": 8192, "stop": ["END"], "repeat_penalty": 1.5}
    with harness.client() as client:
        answer = client.post(
            "/api/chat",
            json={"model": "tiny:latest", "messages": messages, "options": options, "think": False, "stream": False},
        )
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-headrace-ignored-fields"] == "options.num_ctx"
    assert (
        answer.json()["message"] == {"role": "assistant", "content": "hi"} and answer.json()["model"] == "tiny:latest"
    )
    prompt, sampling = replica.last_prompt, replica.submits[-1].sampling
    assert "system\nBe brief." in prompt and prompt.index("tool\nnoon") < prompt.index("tool\n20 degrees")
    assert sampling.max_tokens == 5 and sampling.temperature == 0 and sampling.repetition_penalty == 1.5
    pruned = {"model": "tiny", "messages": [messages[-1], {"role": "assistant", "content": None}, *ASKED]}
    with harness.client() as client:
        assert client.post("/api/chat", json=pruned | {"stream": False}).status_code == 200, "the call was cut out"


def test_a_prompt_with_and_without_the_template(harness: Any, make_replica: Any) -> None:
    replica = _start(harness, make_replica, reply="one two three")
    client = _client(harness)
    whole = client.generate("tiny", "Count.", system="Be brief.", options={"num_predict": 2})
    assert whole.done_reason == "length" and "system\nBe brief." in replica.last_prompt
    parts = [*client.generate("tiny", "Count.", raw=True, stream=True)]
    assert replica.last_prompt == "Count." and "".join(part.response or "" for part in parts) == "one two three"
    assert parts[-1].done and parts[-1].done_reason == "stop"
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    client.generate("tiny", "Count.", format=schema)
    assert '"integer"' in replica.submits[-1].grammar
    client.chat("tiny", ASKED, format="json", think=False)
    assert "json_schema" in replica.submits[-1].grammar


def test_lists_and_loads(shared: Any) -> None:
    client = _client(shared)
    listed = client.list().models
    assert [model.model for model in listed] == ["tiny"]
    info = client.show("tiny")
    assert info.capabilities == ["completion", "tools"] and (info.modelinfo or {})["general.architecture"] == "headrace"
    assert (info.modelinfo or {})["headrace.context_length"] == 256
    assert client.generate("tiny", "").done_reason == "load" and client.chat("tiny").done_reason == "load"
    with shared.client() as http:
        assert http.get("/api/version").json()["version"].count(".") == 2


@pytest.mark.parametrize(
    ("path", "fields", "said"),
    [
        ("chat", {"messages": [{"role": "user", "content": "x", "images": ["aa"]}]}, "reads and answers text only"),
        ("generate", {"prompt": "x", "images": ["aa"]}, "'images' is not supported"),
        ("generate", {"prompt": "x", "suffix": "y"}, "does not fill gaps"),
        ("generate", {"prompt": "x", "context": [1, 2]}, "send the conversation to /api/chat"),
        ("generate", {"prompt": "x", "options": {"temperature": "hot"}}, "temperature"),
        ("generate", {"prompt": "x", "format": "yaml"}, "'format' is not valid"),
        ("chat", {"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role"),
        ("show", {"model": 5}, "'model' is required"),
    ],
)
def test_mistakes_are_one_sentence(shared: Any, path: str, fields: dict[str, Any], said: str) -> None:
    with shared.client() as client:
        answer = client.post(f"/api/{path}", json={"model": "tiny", "stream": False} | fields)
    assert answer.status_code == 400 and said in answer.json()["error"], answer.text
    missing = _client(shared)
    with pytest.raises(ollama.ResponseError) as found:
        missing.chat("none", ASKED)
    assert found.value.status_code == 404 and "'none' does not exist" in found.value.error


def test_a_stream_that_fails_or_waits_has_lines_of_json_alone(harness: Any, make_replica: Any) -> None:
    _start(harness, make_replica, reply="one two three four", end_with_error=True)
    with harness.client() as client:
        answer = client.post("/api/chat", json={"model": "tiny", "messages": ASKED})
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert list(lines[-1]) == ["error"] and all("message" in line for line in lines[:-1])
