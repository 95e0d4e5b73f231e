"""The messages of one chat; prints answers as they arrive: their text to stdout, everything else to stderr."""

import contextlib
import os
import sys
import time
from dataclasses import dataclass, field
from typing import Any, TextIO

from headrace_cluster.cli.api_client import ApiClient, ChatDelta
from headrace_proto.errors import HeadraceError

DIM, RED = "\x1b[2m", "\x1b[31m"
# Control characters of an answer must not reach a terminal, which would interpret them.
_CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


class ChatError(HeadraceError):
    """A command, a setting or an input of a chat cannot be used."""


@dataclass(slots=True)
class Conversation:
    """Messages and answers; the last message has no answer if that failed, or was stopped before its text.

    fields: others of the requests, such as tools. With stream_options, for token counts, the speed is shown.
    """

    client: ApiClient
    model: str
    system: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)

    def ask(self, text: str) -> str | None:
        """Prints the answer to a message, or to the result of a call once all have one; returns its finish reason.

        Raises a HeadraceError, and KeyboardInterrupt: the text that has arrived then counts as the answer.
        """
        if calls := self.open_calls():
            self.messages.append({"role": "tool", "tool_call_id": calls[0], "content": text})
            if len(calls) > 1:
                return None
        else:
            if self.messages and self.messages[-1]["role"] == "user":
                self.messages.pop()
            self.messages.append({"role": "user", "content": text})
        return self._answer()

    def ask_again(self) -> None:
        """Prints another answer to the last message, in place of its answer. Raises as `ask`; ChatError: no message."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if not self.messages:
            raise ChatError("there is no message to ask again")
        self._answer()

    def open_calls(self) -> list[str]:
        """Ids of calls that have no result yet; the next messages are their results."""
        calls = [str(call["id"]) for message in self.messages for call in message.get("tool_calls", ())]
        results = {message.get("tool_call_id") for message in self.messages}
        return [call for call in calls if call not in results]

    def _answer(self) -> str | None:
        answer = _Answer()
        try:
            self._stream(answer)
        except KeyboardInterrupt:
            if answer.text:
                self.messages.append({"role": "assistant", "content": answer.text})
            raise
        # Arguments that the limit of tokens has cut off are no JSON.
        calls = list(answer.calls.values()) if answer.finish_reason != "length" else []
        self.messages.append({"role": "assistant", "content": answer.text} | ({"tool_calls": calls} if calls else {}))
        for call in answer.calls.values():
            show(f"call: {call['function']['name']}({call['function']['arguments']})", DIM)
        if answer.usage:
            show(answer.summary(answer.usage), DIM)
        return answer.finish_reason

    def _stream(self, answer: "_Answer") -> None:
        """Prints and collects an answer. The connection is always closed."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {"model": self.model, "messages": system + self.messages, **self.fields}
        unfinished: TextIO | None = None  # the stream whose line has not ended
        try:
            with contextlib.closing(self.client.chat(body)) as deltas:
                for delta in deltas:
                    answer.add(delta)
                    if delta.reasoning:
                        show(delta.reasoning, DIM, end="")
                        unfinished = sys.stderr
                    if delta.text:
                        show("", end="\n\n" if unfinished is sys.stderr else "")
                        show(delta.text, end="", stream=sys.stdout)
                        unfinished = sys.stdout
        finally:
            if unfinished:
                show("", stream=unfinished)


class _Answer:
    """One answer as far as it has arrived; its time starts now."""

    def __init__(self) -> None:
        self.text = ""
        self.calls: dict[int, dict[str, Any]] = {}
        self.finish_reason: str | None = None
        self.usage: dict[str, Any] | None = None
        self._start = self._first = self._last = time.monotonic()

    def add(self, delta: ChatDelta) -> None:
        if delta.text or delta.reasoning:
            self._last = time.monotonic()
            self._first = self._last if self._first == self._start else self._first
        self.text += delta.text
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.usage = delta.usage or self.usage
        for part in delta.calls:
            given = part.get("function") or {}
            function = {"name": given.get("name"), "arguments": ""}
            new = {"id": part.get("id"), "type": "function", "function": function}
            call = self.calls.setdefault(part.get("index", 0), new)
            call["function"]["arguments"] += given.get("arguments") or ""

    def summary(self, usage: dict[str, Any]) -> str:
        """Tokens by the server's count, tokens per second after the first one, and the time to it."""
        tokens, prompt = (int(usage.get(name, 0)) for name in ("completion_tokens", "prompt_tokens"))
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        spent = self._last - self._first
        rate = f"{(tokens - 1) / spent:.1f} tok/s, " if tokens > 1 and spent > 0 else ""
        return f"{tokens} tokens, {rate}TTFT {self._first - self._start:.2f} s; prompt {prompt} tokens, {cached} cached"


def show(text: str, style: str = "", *, end: str = "\n", stream: TextIO | None = None) -> None:
    """Prints text, to stderr by default; on a terminal without control characters and, unless NO_COLOR, in a style."""
    stream = stream or sys.stderr
    if stream.isatty():
        colored = style and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        text = f"{style}{without_controls(text)}\x1b[0m" if colored else without_controls(text)
    stream.write(text + end)
    stream.flush()


def without_controls(text: str) -> str:
    """Text whose control characters a terminal would interpret."""
    return text.translate(_CONTROLS)
