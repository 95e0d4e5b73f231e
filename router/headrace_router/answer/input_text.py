"""The input of a custom tool's call: free text, which is the one argument of a function for open models."""

import json
from enum import Enum, auto

import regex

INPUT = "input"  # the argument's name
_OPENED = regex.compile(rf'\{{\s*"{INPUT}"\s*:\s*"')
_SPECIAL = regex.compile(r'[\\"]')
_ESCAPE = regex.compile(r"\\(?:u[0-9a-fA-F]{0,4}|.)", regex.DOTALL)
_HIGH = regex.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
_LOW = regex.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")


def opens_input(arguments: str) -> bool:
    """Whether these arguments begin with the string `input`."""
    return _OPENED.match(arguments) is not None


class _Position(Enum):
    BEFORE = auto()  # the string
    INSIDE = auto()
    AFTER = auto()
    NONE = auto()  # there is no such string


class InputText:
    """Reads the input from the JSON of a call's arguments, which arrives in pieces.

    Arguments that do not begin with the string `input` are the input as they are; members after it are left out.
    """

    def __init__(self) -> None:
        self._place = _Position.BEFORE
        self.held = ""  # JSON of which it is not certain yet what it is

    def add(self, arguments: str) -> str:
        """The part of the input that these arguments complete."""
        self.held += arguments
        if self._place is _Position.BEFORE:
            found = _OPENED.match(self.held, partial=True)
            if found is not None and found.partial:
                return ""
            self._place = _Position.NONE if found is None else _Position.INSIDE
            self.held = self.held[found.end() :] if found is not None else self.held
        if self._place is _Position.INSIDE:
            return self._string()
        text, self.held = self.held, ""
        return text if self._place is _Position.NONE else ""

    def finish(self) -> str:
        """The rest of the input of a complete call."""
        return self.held

    def _string(self) -> str:
        found: list[str] = []
        start = 0
        while special := _SPECIAL.search(self.held, start):
            found.append(self.held[start : special.start()])
            start = special.start()
            if special[0] == '"':
                self._place, start = _Position.AFTER, len(self.held)
                break
            escape = _ESCAPE.match(self.held, start)
            end = escape.end() if escape is not None else len(self.held)
            if escape is None or (end == len(self.held) and escape[0].startswith("\\u") and len(escape[0]) < 6):
                break
            if _HIGH.match(self.held, start) and (low := _LOW.match(self.held, end, partial=True)):
                if low.partial:
                    break
                end = low.end()
            found.append(_unescaped(self.held[start:end]))
            start = end
        else:
            found.append(self.held[start:])
            start = len(self.held)
        self.held = self.held[start:]
        return "".join(found)


def _unescaped(escape: str) -> str:
    """What JSON has no escape sequence for stays; half a surrogate pair is no text."""
    try:
        text = str(json.loads(f'"{escape}"', strict=False))
    except ValueError:
        return escape
    return text if len(text) != 1 or not "\ud800" <= text <= "\udfff" else "\ufffd"
