"""The loop of a conversation: entries in, answers out; handles answers that are interrupted or fail."""

import contextlib
import json
import time
from typing import Any, Protocol

from headrace_cluster.cli.api_client import ApiClient
from headrace_cluster.cli.chat.answer_meter import AnswerMeter
from headrace_cluster.cli.chat.chat_settings import ChatSettings
from headrace_cluster.cli.chat.commands import Commands, Next
from headrace_cluster.cli.chat.conversation import Conversation
from headrace_cluster.cli.chat.entry import Command, Message, parse_entry
from headrace_cluster.cli.chat.interrupts import conversation_signals, one_interrupt
from headrace_cluster.cli.chat.terminal import Terminal
from headrace_proto.errors import HeadraceError


class Prompt(Protocol):
    """The source of entries."""

    def read(self) -> str:
        """One entry. Raises KeyboardInterrupt for Ctrl-C without an entry, EOFError at the end."""
        ...


class ChatSession:
    """One conversation with one server."""

    def __init__(
        self, client: ApiClient, conversation: Conversation, settings: ChatSettings, terminal: Terminal
    ) -> None:
        self._client = client
        self._conversation = conversation
        self._settings = settings
        self._terminal = terminal
        self._commands = Commands(conversation, settings, client)

    def answer(self, text: str) -> None:
        """One message, one answer. Raises a HeadraceError, KeyboardInterrupt."""
        self._conversation.pending = text
        self._stream_answer([], {})

    def run(self, prompt: Prompt) -> None:
        """Runs until the user leaves. A failed answer does not end the conversation."""
        with conversation_signals():
            while (next_step := self._read_entry(prompt)) is not Next.END:
                if next_step is Next.ANSWER:
                    self._answer_pending()

    def _read_entry(self, prompt: Prompt) -> Next:
        try:
            entry = parse_entry(prompt.read())
        except KeyboardInterrupt:
            self._terminal.note("(Ctrl-D or /bye leaves)")
            return Next.PROMPT
        except EOFError:
            return Next.END
        if isinstance(entry, Command):
            return self._run_command(entry)
        if isinstance(entry, Message):
            if self._conversation.add_message(entry.text):
                return Next.ANSWER
            self._terminal.note("(and the result of the next call)")
        return Next.PROMPT

    def _run_command(self, command: Command) -> Next:
        try:
            with one_interrupt():
                outcome = self._commands.run(command)
        except HeadraceError as error:
            self._terminal.error(error)
            return Next.PROMPT
        except KeyboardInterrupt:  # during a request for the server's models
            return Next.PROMPT
        if outcome.text:
            self._terminal.show(outcome.text)
        return outcome.next

    def _answer_pending(self) -> None:
        """Answers the pending message. The text of an interrupted answer counts as the answer."""
        pieces: list[str] = []
        calls: dict[int, dict[str, Any]] = {}
        try:
            with self._terminal.bracketed_paste(), one_interrupt():
                finish_reason = self._stream_answer(pieces, calls)
        except KeyboardInterrupt:
            if pieces:
                self._conversation.add_answer("".join(pieces))
                self._terminal.note("(stopped; what is above stays in the conversation, /retry asks again)")
            else:
                self._terminal.note("(stopped before the answer began; /retry asks again)")
        except HeadraceError as error:
            self._terminal.error(error)
            self._terminal.note("(the message is not in the conversation; /retry asks again)")
        else:
            complete = [call for call in calls.values() if _is_complete(call)]
            self._conversation.add_answer("".join(pieces), complete)
            if self._conversation.open_calls:
                self._terminal.note("(the next message is the result of the first call)")
            if finish_reason == "length":
                self._terminal.note("(the limit of tokens is reached; /set max_tokens N changes it)")
            self._terminal.note("")

    def _stream_answer(self, pieces: list[str], calls: dict[int, dict[str, Any]]) -> str | None:
        """Prints the answer as it arrives and collects it in `pieces` and `calls`; returns the finish reason.

        Reasoning and calls are notes. The connection is always closed.
        """
        fields: dict[str, Any] = self._settings.request_fields()
        if self._settings.stats:
            fields["stream_options"] = {"include_usage": True}
        body = {
            "model": self._conversation.model,
            "messages": self._conversation.request_messages(),
            **fields,
        }
        if self._conversation.tools:
            body["tools"] = list(self._conversation.tools)
        meter = AnswerMeter(time.monotonic)
        usage: dict[str, Any] | None = None
        finish_reason: str | None = None
        with contextlib.closing(self._client.chat(body)) as deltas, self._terminal.answer() as write:
            for delta in deltas:
                usage = delta.usage or usage
                finish_reason = delta.finish_reason or finish_reason
                if delta.reasoning:
                    meter.record_text()
                    self._terminal.thought(delta.reasoning)
                for part in delta.calls:
                    _collect(calls, part)
                if delta.text:
                    meter.record_text()
                    pieces.append(delta.text)
                    write(delta.text)
        for call in calls.values():
            self._terminal.note(f"call: {call['function']['name']}({call['function']['arguments']})")
        if self._settings.stats:
            self._terminal.note(meter.summary(usage))
        return finish_reason


def _is_complete(call: dict[str, Any]) -> bool:
    """Whether its arguments were not cut off."""
    try:
        json.loads(call["function"]["arguments"] or "{}")
    except ValueError:
        return False
    return True


def _collect(calls: dict[int, dict[str, Any]], part: dict[str, Any]) -> None:
    """Adds a part of a call to the calls, by their indices."""
    given = part.get("function") or {}
    if part.get("id"):
        calls[part["index"]] = {
            "id": part["id"],
            "type": "function",
            "function": {"name": given.get("name"), "arguments": given.get("arguments") or ""},
        }
    elif part.get("index") in calls:
        calls[part["index"]]["function"]["arguments"] += given.get("arguments") or ""
