"""The text of a prompt, and which of its characters are the client's."""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

from headrace_router.core.errors import InvalidRequestError
from headrace_router.text.chat_template import ChatTemplate, ChatTemplateError

CLIENT, TEMPLATE = "c", "t"
_BEGIN, _END = "\U0010fffc", "\U0010fffd"  # private characters, which no template knows
_OPEN = "\U0010fffb "  # where a message is to be continued; its space shows whether the template trims


class UnmarkedChatError(InvalidRequestError, code="control_token_in_text"):
    """Text of a client spells a control token, and where the template puts this text is not known."""

    def __init__(self) -> None:
        super().__init__(
            "These messages, or definitions of tools, spell one of the model's control tokens, and the model's chat "
            "template changes them in a way that cannot be followed: remove what looks like a control token.",
            param="messages",
        )


class PromptText(Protocol):
    """Text for the model."""

    @property
    def text(self) -> str: ...

    def origins(self, tags: Sequence[str] = ()) -> str:
        """For each character of the text, CLIENT or TEMPLATE. Raises UnmarkedChatError."""
        ...


class ClientText:
    """A bare prompt: all of it is the client's."""

    def __init__(self, text: str) -> None:
        self.text = text

    def origins(self, tags: Sequence[str] = ()) -> str:
        """CLIENT everywhere."""
        return CLIENT * len(self.text)


class RenderedChat:
    """A chat in the model's own format. It is rendered again with marks around the client's strings."""

    def __init__(
        self, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], now: datetime, options: Mapping[str, Any]
    ) -> None:
        """now, options: as for `ChatTemplate.render`, and `continue_final_message`: the answer goes on with its text.

        Raises ChatTemplateError.
        """
        self._template = template
        self._messages = messages
        self._now = now
        self._continues = options.get("continue_final_message", False)
        self._options = {name: value for name, value in options.items() if name != "continue_final_message"}
        self.text = self._render(messages, self._options)

    def strings(self) -> list[str]:
        """All strings of the client but roles and types."""
        return strings([self._messages, self._options])

    def names(self) -> list[str]:
        """Names of fields that the client chose, such as those of a tool's parameters."""
        return names([self._options, *(message.get("tool_calls") for message in self._messages)])

    def origins(self, tags: Sequence[str] = ()) -> str:
        """What is between the marks around a client's string is the client's. See PromptText.

        tags: an assistant's message has these as tokens: the model wrote them.
        """
        if any(_BEGIN in text or _END in text for text in self.strings()):
            raise UnmarkedChatError
        around = re.compile("|".join(map(re.escape, tags)) if tags else r"(?!)")
        mark_own = partial(_mark, around=around)
        messages = [_each(one, mark_own if one.get("role") == "assistant" else _mark) for one in self._messages]
        options = _each(self._options, _mark)
        try:
            marked = self._render(messages, options)
        except ChatTemplateError:
            raise UnmarkedChatError from None
        if marked.replace(_BEGIN, "").replace(_END, "") != self.text:
            raise UnmarkedChatError
        edges = [place for place, char in enumerate(marked) if char in (_BEGIN, _END)]
        found: list[str] = []
        depth = 0
        for start, end in pairwise([-1, *edges, len(marked)]):
            if start >= 0:
                depth += 1 if marked[start] == _BEGIN else -1
            if depth < 0 or (depth > 0 and end == len(marked)):  # the template shows a part of a string only
                raise UnmarkedChatError
            found.append((CLIENT if depth > 0 else TEMPLATE) * (end - start - 1))
        return "".join(found)

    def _render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        if not self._continues:
            return self._template.render(messages, self._now, options)
        last = {**messages[-1], "content": f"{messages[-1].get('content') or ''}{_OPEN}"}
        rendered = self._template.render([*messages[:-1], last], self._now, {**options, "add_generation_prompt": False})
        place = rendered.rfind(_OPEN.strip())
        if place < 0:
            raise ChatTemplateError("The model's chat template does not show the last message.", param="messages")
        kept = rendered[:place]
        return kept if rendered.startswith(_OPEN, place) else kept.rstrip()


def _mark(text: str, around: re.Pattern[str] | None = None) -> str:
    """The text between marks, which are inside of the white space around it: templates trim.

    around: what is left without marks.
    """
    if around is not None:
        rest = iter(around.findall(text))
        return "".join(_mark(piece) + next(rest, "") for piece in around.split(text))
    inner = text.strip()
    if not inner:
        return text
    start = text.index(inner)
    return f"{text[:start]}{_BEGIN}{inner}{_END}{text[start + len(inner) :]}"


def strings(value: Any) -> list[str]:
    """All strings in a JSON value but roles and types."""
    found: list[str] = []

    def keep(text: str) -> str:
        found.append(text)
        return text

    _each(value, keep)
    return found


def names(value: Any) -> list[str]:
    """The names of all fields in a JSON value."""
    if isinstance(value, Mapping):
        return [*map(str, value), *(name for member in value.values() for name in names(member))]
    return [name for member in value for name in names(member)] if isinstance(value, list | tuple) else []


def _each(value: Any, change: Callable[[str], str], name: str = "") -> Any:
    """The value with each string but roles and types changed; names of fields are not."""
    if isinstance(value, str):
        return value if name in ("role", "type") else change(value)
    if isinstance(value, Mapping):
        return {key: _each(member, change, key) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_each(member, change, name) for member in value]
    return value
