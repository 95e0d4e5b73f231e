"""The text of a prompt, and which of its characters are the user's."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from headrace_router.core.errors import InvalidRequestError
from headrace_router.text.chat_template import ChatTemplate, ChatTemplateError
from headrace_router.text.traced_text import TextTrace, UntraceableTextError


class UntraceableChatError(InvalidRequestError, code="chat_not_traceable"):
    """Which text of a rendered chat is the user's is not known, so it may contain control tokens of the user."""

    def __init__(self) -> None:
        super().__init__(
            "The model's chat template changes these messages in a way that cannot be followed, so control tokens in "
            "them would not be found: use plainer text, or /v1/completions with a prompt in the model's own format.",
            param="messages",
        )


class PromptText(Protocol):
    """Text for the model."""

    @property
    def text(self) -> str: ...

    def trace(self) -> str:
        """Text of the same length, in parts of which `is_user` recognizes the user's characters."""
        ...

    def is_user(self, traced: str) -> bool:
        """Whether any of these characters of the trace is the user's."""
        ...


class UserText:
    """A bare prompt: all of it is the user's."""

    def __init__(self, text: str) -> None:
        self.text = text

    def trace(self) -> str:
        """The text itself."""
        return self.text

    def is_user(self, traced: str) -> bool:
        """Always."""
        return True


class RenderedChat:
    """A chat in the model's own format. It is rendered again only for the trace, with the same date."""

    def __init__(self, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], now: datetime) -> None:
        """now: the date that the template may write. Raises ChatTemplateError."""
        self.text = template.render(messages, now)
        self._template = template
        self._messages = messages
        self._now = now
        self._trace = TextTrace()

    def trace(self) -> str:
        """The rendering of marked messages. Raises UntraceableChatError."""
        try:
            traced = self._template.render(self._trace.mark(self._messages), self._now)
        except (ChatTemplateError, UntraceableTextError):
            traced = ""
        if self._trace.plain(traced) != self.text:
            raise UntraceableChatError
        return traced

    def is_user(self, traced: str) -> bool:
        """See PromptText."""
        return self._trace.is_user(traced)
