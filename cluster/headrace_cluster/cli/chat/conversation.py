"""The messages of one chat. Pure."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Conversation:
    """Messages and answers, alternating. `pending` is the message without an answer, or whose answer failed."""

    model: str
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    pending: str | None = None

    def request_messages(self) -> list[dict[str, str]]:
        """The messages of a request: the system message, the conversation, the pending message."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        last = [{"role": "user", "content": self.pending}] if self.pending is not None else []
        return first + self.messages + last

    def add_answer(self, text: str) -> None:
        """Adds the pending message and its answer to the conversation."""
        if self.pending is None:
            raise ValueError("no message waits for an answer")
        self.messages.append({"role": "user", "content": self.pending})
        self.messages.append({"role": "assistant", "content": text})
        self.pending = None

    def prepare_retry(self) -> bool:
        """Makes the last message pending again and removes its answer. False when there is none."""
        if self.pending is None and [message["role"] for message in self.messages[-2:]] == ["user", "assistant"]:
            self.pending = self.messages[-2]["content"]
            del self.messages[-2:]
        return self.pending is not None

    def clear(self) -> None:
        """Removes all messages; the model and the system message are kept."""
        self.messages = []
        self.pending = None
