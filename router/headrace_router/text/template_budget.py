"""How much a chat template may make of its messages, counted before it is made (docs/reliability.md R7)."""

from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, Set, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

LARGEST_TEXT = 1 << 23  # characters of one text: eight times what the messages of a request have by default
ALL_TEXT = 1 << 28  # characters of all that one rendering makes, most of which is released at once
ENTRY = 32  # characters that an entry of a list counts as
PIECE = 8  # characters that each piece of text in a loop's body counts as, whenever it may be written
CALL = 16  # characters that a call, a filter or a comparison counts as
PASS = 64  # characters that a pass of a loop and a call of a macro count as, at least
NODE = 2  # characters that each operation in the body of a loop or macro counts as, whether it is run or not

MANY = (Sequence, Mapping, Set, KeysView, ItemsView, ValuesView)

_left: ContextVar[list[int]] = ContextVar("characters that the rendering may still make")


class TemplateSizeError(SecurityError):
    """A template makes too much of its messages, or takes too many steps."""


@contextmanager
def render_budget() -> Iterator[None]:
    """One rendering: what it makes inside is counted."""
    token = _left.set([ALL_TEXT])
    try:
        yield
    finally:
        _left.reset(token)


def allow(size: int) -> int:
    """Checks the size of a value that is about to be made, and returns it. Raises TemplateSizeError."""
    if size > LARGEST_TEXT:
        raise TemplateSizeError("too much text")
    return size


def spend(size: int) -> None:
    """Counts what was made. Raises TemplateSizeError."""
    left = _left.get()
    left[0] -= size
    if left[0] < 0:
        raise TemplateSizeError("too much text in all")


def refuse_number(number: float) -> int:
    """Returns the number, of characters or entries. Raises SecurityError, since no message makes it smaller."""
    if abs(number) > LARGEST_TEXT:
        raise SecurityError("a number is too large")
    return int(number)


def spend_value(value: Any) -> Any:
    """Counts a value that was made, without what it refers to, and returns it. Raises TemplateSizeError."""
    if isinstance(value, (str, bytes)):
        spend(CALL + allow(len(value)))
    else:
        spend(CALL + ENTRY * len(value) if isinstance(value, (list, tuple, dict, set)) else CALL)
    return value


def text_size(value: Any, indent: int = 0) -> int:
    """About as many characters as the value has when it is written; more than LARGEST_TEXT if there are more.

    A list that contains another one twice is written with both. indent: characters before an entry, for each level.
    Each entry is counted. Raises TemplateSizeError if there are too many in all.
    """
    if isinstance(value, (str, bytes)):
        return len(value)
    size, rest = 0, [(value, 1)]
    while rest and size <= LARGEST_TEXT:
        part, depth = rest.pop()
        spend(ENTRY)
        if isinstance(part, Namespace):
            part = object.__getattribute__(part, "_Namespace__attrs")
        if isinstance(part, (str, bytes)):
            size += len(part)
        elif isinstance(part, int):
            size += part.bit_length() // 3
        elif isinstance(part, MANY) and not isinstance(part, range):
            size += len(part) * (ENTRY + indent * depth)
            if size <= LARGEST_TEXT:
                entries = [*part, *part.values()] if isinstance(part, Mapping) else part
                rest.extend((entry, depth + 1) for entry in entries)
        size += ENTRY
    return size
