"""Strings of a user that can be recognized in what a template makes of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex

_SLICE = 1 << 16  # characters: a longer one would hold the interpreter lock for too long
_PRIVATE_USE = (*range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE))  # characters that no tokenizer or template knows


class UntraceableTextError(ValueError):
    """There are more different characters than private ones."""


class TextTrace:
    """Replaces each character of a user's strings, white space excepted, by a private one; one per rendering.

    A template that renders replaced strings writes its own text as always, so every private character of the result is
    the user's. What it decides from a string it decides as for the plain one, since `TracedText` compares and searches
    as that does. The caller renders both and compares: the trace is valid if `plain(traced)` is the plain rendering.
    """

    def __init__(self) -> None:
        self._private = _PrivateCharacters()

    def mark(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages with all strings but roles replaced. Raises UntraceableTextError."""
        return [
            {
                key: self.text(value) if key != "role" and isinstance(value, str) else value
                for key, value in message.items()
            }
            for message in messages
        ]

    def text(self, plain: str) -> "TracedText":
        return TracedText(_translate(plain, self._private), plain, self)

    def plain(self, traced: str) -> str:
        return _translate(traced, self._private.originals)

    def is_user(self, traced: str) -> bool:
        """Whether any of these characters is the user's."""
        return any(ord(char) in self._private.originals for char in traced)


class _PrivateCharacters(dict[int, int]):
    """From code points to private ones, which are assigned on first use."""

    def __init__(self) -> None:
        self.originals: dict[int, int] = {}

    def __missing__(self, code: int) -> int:
        private = code
        if not chr(code).isspace():  # templates trim
            if len(self.originals) == len(_PRIVATE_USE):
                raise UntraceableTextError
            private = _PRIVATE_USE[len(self.originals)]
            self.originals[private] = code
        self[code] = private
        return private


class TracedText(str):
    """Private characters that compare, search and split as the plain string; each result is the user's as a whole."""

    __slots__ = ("_plain", "_trace")

    _plain: str
    _trace: TextTrace

    def __new__(cls, traced: str, plain: str, trace: TextTrace) -> "TracedText":
        self = super().__new__(cls, traced)
        self._plain, self._trace = plain, trace
        return self

    def __str__(self) -> str:
        return self  # else filters such as `replace` would work on a bare copy

    def __eq__(self, other: object) -> bool:
        return bool(self._plain == _as_plain(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._plain)

    def __contains__(self, part: object) -> bool:
        return _as_plain(part) in self._plain

    def __getitem__(self, place: SupportsIndex | slice) -> str:
        return self._trace.text(self._plain[place])

    def __iter__(self) -> Iterator[str]:
        return map(self._trace.text, self._plain)


def traced_json(value: Any, dump: Callable[[Any], str]) -> str:
    """What `dump` makes of a value; all of it is the user's if the value contains traced text."""
    traces: list[TextTrace] = []

    def plain(part: Any) -> Any:
        if isinstance(part, TracedText):
            traces.append(part._trace)
            return part._plain
        if isinstance(part, dict):
            return {plain(key): plain(entry) for key, entry in part.items()}
        return list(map(plain, part)) if isinstance(part, (list, tuple)) else part

    text = dump(plain(value))
    return traces[0].text(text) if traces else text


def _as_plain(value: Any) -> Any:
    return value._plain if isinstance(value, TracedText) else value


def _like_plain(name: str) -> Callable[..., Any]:
    def method(self: TracedText, *args: Any, **kwargs: Any) -> Any:
        plain_args = [list(map(_as_plain, arg)) if isinstance(arg, list) else _as_plain(arg) for arg in args]
        result = getattr(self._plain, name)(*plain_args, **{key: _as_plain(arg) for key, arg in kwargs.items()})
        if isinstance(result, str):
            return self._trace.text(result)
        if isinstance(result, (list, tuple)):
            return type(result)(map(self._trace.text, result))
        return result

    method.__name__ = name
    return method


# Formatting is left to the sandbox, which has a way of its own for it.
for _name in dir(str):
    if not _name.startswith("_") and _name not in {"format", "format_map", "maketrans"}:
        setattr(TracedText, _name, _like_plain(_name))


def _translate(text: str, table: Mapping[int, int]) -> str:
    return "".join(text[at : at + _SLICE].translate(table) for at in range(0, len(text), _SLICE))
