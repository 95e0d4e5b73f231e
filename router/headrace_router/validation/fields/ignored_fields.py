"""The ignored fields of a request, as one response header."""

import re

HEADER = b"x-headrace-ignored-fields"
MAX_NAMES = 16
MAX_NAME_CHARS = 64

_NOT_PLAIN = re.compile(r"[^A-Za-z0-9_.\[\]-]")


class IgnoredFields:
    """Collects names for the header: bounded in number and length, and reduced to plain characters."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        self._more = False

    def add(self, name: str) -> None:
        if self._more:
            return
        shown = _NOT_PLAIN.sub("_", name[:MAX_NAME_CHARS])
        if shown in self._names:
            return
        if len(self._names) < MAX_NAMES:
            self._names[shown] = None
        else:
            self._more = True

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The header, or an empty list if nothing was ignored. `...` replaces the names beyond the limit."""
        if not self._names:
            return []
        return [(HEADER, ", ".join([*self._names, *(["..."] if self._more else [])]).encode())]
