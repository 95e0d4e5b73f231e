"""The three dialects of chats with real replicas: over pools, cached turns, and kill -9 inside of a call of a tool."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from support.e2e.headrace_process import SMALL, Serve, headrace

pytestmark = pytest.mark.faults("serve")

PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
SYSTEM = "Rule: answer in one sentence, and look things up. " * 30
STORY = {"type": "object", "properties": {"text": {"type": "string", "minLength": 160}}, "required": ["text"]}


def _body(path: str, texts: list[str], *, tool: bool = False, tokens: int = 200) -> dict[str, Any]:
    """A chat of a user and an assistant in turn, after the system prompt; greedy. tool: an answer is a call of it."""
    roles = ("user", "assistant") * len(texts)
    messages: list[Any] = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    found: dict[str, Any] = {"model": "smollm2", "temperature": 0}
    if path == "/v1/messages":
        found |= {"system": SYSTEM, "messages": messages, "max_tokens": tokens}
        if tool:
            found |= {
                "tools": [{"name": "tell", "input_schema": STORY, "strict": True}],
                "tool_choice": {"type": "any"},
            }
    elif path == "/v1/responses":
        found |= {"instructions": SYSTEM, "input": messages, "max_output_tokens": tokens}
        if tool:
            function: Any = {"type": "function", "name": "tell", "parameters": STORY, "strict": True}
            found |= {"tools": [function], "tool_choice": "required"}
    else:
        found |= {"messages": [{"role": "system", "content": SYSTEM}, *messages], "max_tokens": tokens}
        found |= {"stream_options": {"include_usage": True}}
        if tool:
            function = {"type": "function", "function": {"name": "tell", "parameters": STORY, "strict": True}}
            found |= {"tools": [function], "tool_choice": "required"}
    return {**found, "stream": True}


def _name(path: str) -> str:
    """The id of the request whose replica is killed."""
    return f"killed{path.replace('/', '-')}"


def _events(serve: Serve, path: str, body: dict[str, Any], at: Callable[[int], None] | None = None) -> Iterator[Any]:
    """at: called with the number of each event."""
    named = {"x-request-id": _name(path)} if at is not None else {}
    with httpx.stream("POST", f"{serve.url}{path}", json=body, headers=named, timeout=90, trust_env=False) as response:
        assert response.status_code == 200, response.read()
        count = 0
        for line in response.iter_lines():
            if line.startswith("data: {"):
                count += 1
                if at is not None:
                    at(count)
                yield json.loads(line.removeprefix("data: "))


def _answer(path: str, events: Iterator[Any]) -> tuple[str, str, int, int]:
    """Text, arguments of calls, tokens of the prompt, and cached ones of them."""
    text = arguments = ""
    prompt = cached = 0
    for event in events:
        assert event.get("type") not in ("error", "response.failed") and "error" not in event, event
        if path == "/v1/messages":
            delta = event.get("delta", {})
            text, arguments = text + delta.get("text", ""), arguments + delta.get("partial_json", "")
            usage = event.get("usage") or event.get("message", {}).get("usage")
            if usage:
                cached = usage["cache_read_input_tokens"]
                prompt = cached + usage["input_tokens"]
        elif path == "/v1/responses":
            text += event["delta"] if event["type"] == "response.output_text.delta" else ""
            arguments += event["delta"] if event["type"] == "response.function_call_arguments.delta" else ""
            if event["type"] in ("response.completed", "response.incomplete"):
                usage = event["response"]["usage"]
                prompt, cached = usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
        else:
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
                for call in choice["delta"].get("tool_calls") or ():
                    arguments += call["function"]["arguments"]
            if event.get("usage"):
                usage = event["usage"]
                prompt, cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    return text, arguments, prompt, cached


def test_over_pools_answers_are_equal_and_the_second_turn_is_cached(start: Callable[..., Serve]) -> None:
    serve = start(
        *SMALL, "--kv-cache-memory", "128MiB", "--cpu-threads", "1", "--prefill", "1", "--decode", "1",
        "--disaggregation", "auto",
    ).await_ready()  # fmt: skip
    answers = set()
    for path in PATHS:
        texts = ["What is a river?"]
        first, _, prompt, _ = _answer(path, _events(serve, path, _body(path, texts, tokens=40)))
        texts += [first, "And what is a lake?"]
        second, _, longer, cached = _answer(path, _events(serve, path, _body(path, texts, tokens=40)))
        assert longer > prompt > 300 and cached >= 0.95 * prompt, (path, prompt, longer, cached)
        answers.add((first, second))
    assert len(answers) == 1 and all(map(all, answers)), answers


def test_a_call_goes_on_after_kill_9_in_each_dialect(
    start: Callable[..., Serve], eventually: Callable[..., None]
) -> None:
    serve = start(
        *SMALL, "--kv-cache-memory", "128MiB", "--cpu-threads", "1", "--replicas", "2"
    ).await_ready()  # fmt: skip

    def ready() -> list[Any]:
        return [replica for replica in serve.status()["replicas"] if replica["state"] == "ready"]

    for count, path in enumerate(PATHS, 1):
        eventually(lambda: len(ready()) == 2, 90)
        body = _body(path, ["Tell a story."], tool=True)
        expected = _answer(path, _events(serve, path, body))
        assert len(expected[1]) > 160, expected
        killed: list[str] = []

        def kill(number: int, path: str = path, killed: list[str] = killed) -> None:
            """The replica that runs the request, inside of the call."""
            if number == 20:
                account = json.loads(headrace(serve.home, "explain", _name(path), "--json").stdout)
                killed.append(account["decisions"][0]["replica_id"])
                (replica,) = [one for one in ready() if one["id"] == killed[0]]
                os.kill(replica["ranks"][0]["pid"], signal.SIGKILL)

        moved = _answer(path, _events(serve, path, body, kill))
        assert killed and moved[:2] == expected[:2], path
        page = httpx.get(f"{serve.url}/metrics", trust_env=False).text
        assert f'headrace_migrations_total{{model_name="smollm2"}} {count}.0' in page
