"""Stop strings in a stream of text: found across chunk borders, and never sent to the client."""

from collections.abc import Sequence


class StopMatcher:
    """Receives pieces of text, returns the text that is safe to send.

    Text that may be the beginning of a stop string is held back until the next piece decides. Of several matches the
    one that ends first is taken (the longest of several), so the result does not depend on how the text was split.

        >>> matcher = StopMatcher(["END"])
        >>> matcher.push("the E"), matcher.push("ND of it"), matcher.matched
        ('the ', '', True)
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.matched = False

    @property
    def holding(self) -> bool:
        """Whether text is held back."""
        return bool(self._held)

    def push(self, piece: str) -> str:
        """Adds a piece and returns what may be sent. Returns nothing more after a match."""
        if self.matched:
            return ""
        text = self._held + piece
        match = min(((at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0), default=None)
        if match is not None:
            self.matched = True
            self._held = ""
            return text[: match[1]]
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text still held back: it was no stop string after all."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Length of the longest suffix of `text` that a stop string starts with."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
