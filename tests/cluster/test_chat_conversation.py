"""Messages, commands and tools of `headrace chat`, without a terminal."""

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import pytest

from headrace_cluster.cli.api_client import ApiClient, ChatDelta
from headrace_cluster.cli.chat import (
    ChatError,
    Conversation,
    read_tools,
    run_command,
    run_conversation,
    without_controls,
)

TOOLS = [{"type": "function", "function": {"name": "get_weather"}}]
SUNNY = [ChatDelta("Sunny."), ChatDelta(finish_reason="stop")]


def _part(index: int, arguments: str, name: str = "") -> ChatDelta:
    head = {"id": f"id{index}", "type": "function"} if name else {}
    function = {"name": name, "arguments": arguments} if name else {"arguments": arguments}
    return ChatDelta(calls=({"index": index, **head, "function": function},))


CALLS = [
    ChatDelta(reasoning="I need "),
    ChatDelta(reasoning="two cities."),
    ChatDelta("Let me look."),
    _part(0, "", "get_weather"),
    _part(0, '{"city": "Bern"}'),
    _part(1, '{"city": "Rom"}', "get_weather"),
    ChatDelta(finish_reason="tool_calls"),
]


class Client:
    """Answers by a script."""

    def __init__(self, *answers: list[ChatDelta]) -> None:
        self._answers = list(answers)
        self.bodies: list[dict[str, Any]] = []

    def chat(self, body: dict[str, Any]) -> Generator[ChatDelta, None, None]:
        self.bodies.append(json.loads(json.dumps(body)))
        yield from self._answers.pop(0)

    def models(self) -> list[str]:
        return ["tiny", "small"]


def _chat(*answers: list[ChatDelta]) -> Conversation:
    return Conversation(cast(ApiClient, Client(*answers)), "tiny")


def _enter(conversation: Conversation, *entries: str) -> None:
    rest = iter((*entries, "/bye"))
    run_conversation(conversation, lambda: next(rest))


def test_set_shows_and_changes_fields_of_requests() -> None:
    chat = _chat()
    for argument in ("temperature 0.5", "max_tokens 9", "stats on", "temperature default"):
        assert run_command(f"/set {argument}", chat) == argument.replace(" ", " is ")
    for argument, words in {"top_p 0,5": "top_p is a number, not 0,5", "seeds 7": "there is no setting seeds"}.items():
        with pytest.raises(ChatError, match=words):
            run_command(f"/set {argument}", chat)
    assert chat.fields == {"max_tokens": 9, "stream_options": {"include_usage": True}}
    assert "top_k is default\n" in run_command("/set", chat)


def test_clear_keeps_the_system_message() -> None:
    chat = _chat(SUNNY, SUNNY)
    _enter(chat, "/system be brief", "a", "/clear", "/model small", " /b")
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": " /b"}]
    assert cast(Client, chat.client).bodies[1] == {"model": "small", "messages": messages}
    assert run_command("/system none", chat) == "There is no system message."
    assert run_command("/model", chat) == "  tiny\n* small"
    for line, words in (("/model huge", "it has: tiny, small"), ("/usr/bin/env python", "/help lists them")):
        with pytest.raises(ChatError, match=words):
            run_command(line, chat)


def test_calls_and_their_results(capsys: pytest.CaptureFixture[str]) -> None:
    chat = _chat(CALLS, SUNNY)
    _enter(chat, "Weather?", "20 degrees", "30 degrees")
    shown = capsys.readouterr()
    assert shown.out == "Let me look.\nSunny.\n"
    assert "I need two cities.\n\n" in shown.err and "(the next message is the result" in shown.err
    assert 'call: get_weather({"city": "Bern"})' in shown.err and 'call: get_weather({"city": "Rom"})' in shown.err
    asked, called, *results = cast(Client, chat.client).bodies[-1]["messages"]
    assert asked == {"role": "user", "content": "Weather?"}
    assert [call["function"]["arguments"] for call in called["tool_calls"]] == ['{"city": "Bern"}', '{"city": "Rom"}']
    found = [(result["role"], result["tool_call_id"], result["content"]) for result in results]
    assert found == [("tool", "id0", "20 degrees"), ("tool", "id1", "30 degrees")]


def test_the_call_of_a_custom_tool(capsys: pytest.CaptureFixture[str]) -> None:
    parts = ({"id": "a", "type": "custom", "custom": {"name": "run", "input": "1 +"}}, {"custom": {"input": " 2"}})
    chat = _chat([*(ChatDelta(calls=({"index": 0, **part},)) for part in parts), *CALLS[-1:]], SUNNY)
    _enter(chat, "What is 1 + 2?", "3")
    assert "call: run(1 + 2)" in capsys.readouterr().err
    _, called, _ = cast(Client, chat.client).bodies[-1]["messages"]
    assert called["tool_calls"] == [{"id": "a", "type": "custom", "custom": {"name": "run", "input": "1 + 2"}}]


def test_calls_that_the_limit_of_tokens_cuts_off_are_not_sent_back() -> None:
    chat = _chat([_part(0, '{"city": "Be', "get_weather"), ChatDelta(finish_reason="length")])
    _enter(chat, "Weather?")
    assert chat.messages[-1] == {"role": "assistant", "content": ""}


def test_tools_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "tools.json"
    with pytest.raises(ChatError, match="cannot be read"):
        read_tools(file)
    for content, words in (("{}", "not a list of tools"), ("[", "cannot be read as JSON")):
        file.write_text(content)
        with pytest.raises(ChatError, match=words):
            read_tools(file)
    file.write_text(json.dumps(TOOLS))
    assert read_tools(file) == TOOLS


def test_control_characters_are_removed() -> None:
    assert without_controls("red \x1b[31mtext\x07\x9b1m\n\tend") == "red [31mtext1m\n\tend"
