"""The messages of one chat. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Conversation:
    """Messages and answers, alternating. `pending` is the message without an answer, or whose answer failed.

    tools: that the model may call. open_calls: ids of the last answer's calls that have no result; the next messages
    are their results.
    """

    model: str
    system: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    pending: str | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    open_calls: list[str] = field(default_factory=list)

    def request_messages(self) -> list[dict[str, Any]]:
        """The messages of a request: the system message, the conversation, the pending message."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        last = [self._message(self.pending)] if self.pending is not None else []
        return first + self.messages + last

    def add_message(self, text: str) -> bool:
        """A message of the user, or the result of a call; True if an answer is next, False if another result is."""
        if len(self.open_calls) > 1:
            self.messages.append(self._message(text))
            self.open_calls.pop(0)
            return False
        self.pending = text
        return True

    def add_answer(self, text: str, calls: Sequence[Mapping[str, Any]] = ()) -> None:
        """Adds the pending message and its answer to the conversation. calls: of tools, as in OpenAI's API."""
        if self.pending is None:
            raise ValueError("no message waits for an answer")
        self.messages.append(self._message(self.pending))
        self.messages.append({"role": "assistant", "content": text} | ({"tool_calls": list(calls)} if calls else {}))
        self.open_calls = [str(call["id"]) for call in calls]
        self.pending = None

    def _message(self, text: str) -> dict[str, Any]:
        if self.open_calls:
            return {"role": "tool", "tool_call_id": self.open_calls[0], "content": text}
        return {"role": "user", "content": text}

    def prepare_retry(self) -> bool:
        """Makes the last message pending again and removes its answer. False when there is none."""
        if self.pending is None and [message["role"] for message in self.messages[-2:]] == ["user", "assistant"]:
            self.pending = self.messages[-2]["content"]
            del self.messages[-2:]
            self.open_calls = []
        return self.pending is not None

    def clear(self) -> None:
        """Removes all messages; the model and the system message are kept."""
        self.messages = []
        self.open_calls = []
        self.pending = None
