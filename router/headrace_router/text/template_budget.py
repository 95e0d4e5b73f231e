"""How much a chat template may make of its messages, counted before it is made."""

import gc
import sys
from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, Set, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

LARGEST_TEXT = 1 << 23  # characters of one text: eight times what the messages of a request have by default
ALL_TEXT = 1 << 28  # of all that one rendering makes, which it may hold until its end: characters count as their bytes
GARBAGE = 1 << 29  # of what several renderings made, after which all that holds itself is freed
ENTRY = 32  # characters that an entry of a list counts as
PIECE = 8  # characters that an attribute, and each piece of text in a loop's body, count as
CALL = 16  # characters that a filter or a comparison counts as
PASS = 64  # characters that a pass of a loop, a call and each part of a format count as, at least
DEEPEST = 1000  # levels of a value that is written, compared or hashed: CPython hashes by recursion, without a bound
NODE = 2  # characters that each operation in the body of a loop or macro counts as, whether it is run or not

MANY = (Sequence, Mapping, Set, KeysView, ItemsView, ValuesView)

_made = 0  # since the last collection
_left: ContextVar[list[int]] = ContextVar("characters that the rendering may still make")


class TemplateSizeError(SecurityError):
    """A template makes too much of its messages, or takes too many steps."""


@contextmanager
def render_budget() -> Iterator[None]:
    """One rendering: what it makes inside is counted.

    A template can make values that contain themselves, which CPython frees after very many renderings only.
    """
    global _made
    if _made > GARBAGE:
        _made = 0
        gc.collect()
    left = [ALL_TEXT]
    token = _left.set(left)
    try:
        yield
    finally:
        _left.reset(token)
        _made += ALL_TEXT - left[0]


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
    if isinstance(value, str):
        allow(len(value))
    entries = len(value) if isinstance(value, (list, tuple, dict, set)) else 0
    spend(CALL + max(sys.getsizeof(value), ENTRY * entries))
    return value


def spend_parts(source: Any, made: Any) -> Any:
    """Counts what was made of `source`; if that is text, so are the parts, none of which existed before."""
    spend_value(made)
    if isinstance(source, str) and isinstance(made, (list, tuple)):
        for part in made:
            spend_value(part)
    return made


def text_size(value: Any, indent: int = 0) -> int:
    """About as many characters as the value has when it is written; more than LARGEST_TEXT if there are more.

    A list that contains another one twice is written with both. indent: characters before an entry, for each level.
    Each entry is counted. Raises TemplateSizeError if there are too many in all, or too many levels.
    """
    if isinstance(value, str):
        return len(value)
    size, rest = 0, [(value, 1)]
    while rest and size <= LARGEST_TEXT:
        part, depth = rest.pop()
        spend(ENTRY)
        if depth > DEEPEST:
            raise TemplateSizeError("too deep")
        if isinstance(part, Namespace):
            part = object.__getattribute__(part, "_Namespace__attrs")
        if isinstance(part, str):
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
