"""Tools in `headrace chat`: reasoning and calls are shown apart from the answer, and the next messages are results."""

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import pytest

from headrace_cluster.cli.api_client import ApiClient, ChatDelta
from headrace_cluster.cli.chat.chat_settings import ChatSettings
from headrace_cluster.cli.chat.conversation import Conversation
from headrace_cluster.cli.chat.session import ChatSession
from headrace_cluster.cli.chat.start import ChatInputError, start_chat
from headrace_cluster.cli.chat.terminal import Terminal
from headrace_cluster.cli.chat.transcript import load_transcript, save_transcript

TOOLS = [{"type": "function", "function": {"name": "get_weather"}}]


def _part(index: int, arguments: str, name: str = "") -> ChatDelta:
    head = {"id": f"id{index}", "type": "function"} if name else {}
    function = {"name": name, "arguments": arguments} if name else {"arguments": arguments}
    return ChatDelta(calls=({"index": index, **head, "function": function},))


class Client:
    """Answers by a script."""

    def __init__(self, *answers: list[ChatDelta]) -> None:
        self._answers = list(answers)
        self.bodies: list[dict[str, Any]] = []

    def chat(self, body: dict[str, Any]) -> Generator[ChatDelta, None, None]:
        self.bodies.append(json.loads(json.dumps(body)))
        yield from self._answers.pop(0)

    def models(self) -> list[str]:
        return ["tiny"]


class Entries:
    def __init__(self, *entries: str) -> None:
        self._entries = list(entries)

    def read(self) -> str:
        if not self._entries:
            raise EOFError
        return self._entries.pop(0)


CALLS = [
    ChatDelta(reasoning="I need "),
    ChatDelta(reasoning="two cities."),
    ChatDelta("Let me look."),
    _part(0, "", "get_weather"),
    _part(0, '{"city": "Bern"}'),
    _part(1, '{"city": "Rom"}', "get_weather"),
    ChatDelta(finish_reason="tool_calls"),
]


def test_calls_and_their_results(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    client = Client(CALLS, [ChatDelta("Sunny."), ChatDelta(finish_reason="stop")])
    conversation = Conversation("tiny", tools=TOOLS)
    session = ChatSession(cast(ApiClient, client), conversation, ChatSettings(), Terminal())
    session.run(Entries("Weather?", "20 degrees", "30 degrees"))
    shown = capsys.readouterr()
    assert shown.out == "Let me look.\nSunny.\n"
    assert "I need two cities.\n\n" in shown.err
    assert 'call: get_weather({"city": "Bern"})' in shown.err and 'call: get_weather({"city": "Rom"})' in shown.err
    assert [body["tools"] for body in client.bodies] == [TOOLS, TOOLS]
    last = client.bodies[-1]["messages"]
    assert [message["role"] for message in last] == ["user", "assistant", "tool", "tool"]
    assert [call["function"]["arguments"] for call in last[1]["tool_calls"]] == ['{"city": "Bern"}', '{"city": "Rom"}']
    assert [(one["tool_call_id"], one["content"]) for one in last[2:]] == [("id0", "20 degrees"), ("id1", "30 degrees")]
    path = tmp_path / "saved"
    save_transcript(path, conversation, ChatSettings(), replace=False)
    loaded = Conversation("other")
    load_transcript(path, loaded, ChatSettings())
    assert loaded.request_messages() == conversation.request_messages() and loaded.tools == TOOLS
    assert not loaded.open_calls


def test_a_loaded_conversation_goes_on_with_the_result_of_its_call(tmp_path: Path) -> None:
    client = Client(CALLS)
    conversation = Conversation("tiny", tools=TOOLS)
    session = ChatSession(cast(ApiClient, client), conversation, ChatSettings(), Terminal())
    session.run(Entries("Weather?", "20 degrees"))
    path = tmp_path / "saved"
    save_transcript(path, conversation, ChatSettings(), replace=False)
    loaded = Conversation("tiny")
    load_transcript(path, loaded, ChatSettings())
    assert loaded.open_calls == ["id1"] and loaded.add_message("30 degrees")
    assert loaded.request_messages()[-1] == {"role": "tool", "tool_call_id": "id1", "content": "30 degrees"}


def test_tools_come_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tools.json"
    file.write_text(json.dumps(TOOLS))
    client = Client(CALLS)

    def start() -> None:
        start_chat(cast(ApiClient, client), once="Hi", model=None, system=None, fields={}, stats=False, tools=file)

    start()
    assert client.bodies[0]["tools"] == TOOLS and 'call: get_weather({"city": "Bern"})' in capsys.readouterr().err
    file.write_text("{}")
    with pytest.raises(ChatInputError, match="not a list of tools"):
        start()
    file.write_text("[")
    with pytest.raises(ChatInputError, match="not JSON"):
        start()
    file.unlink()
    with pytest.raises(ChatInputError, match="cannot be read"):
        start()
