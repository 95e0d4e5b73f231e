"""Stop strings in a stream of text: found across chunk borders, and never sent to the client."""

from collections.abc import Sequence


class _Stop:
    """One stop string, and how much of it the text so far ends with (Knuth, Morris, Pratt 1977).

    The cost of a piece is proportional to its length, whatever the text and the string are. The table is made as far as
    it is needed: few texts reach far into a stop string.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.state = 0  # characters of `text` that the stream ends with
        self._borders = [0]  # for each beginning of `text`: the longest shorter one that it ends with

    def push(self, piece: str) -> int:
        """The end of the first match in the piece, -1 if there is none."""
        text, state, position = self.text, self.state, 0
        while position < len(piece):
            if not state:
                position = piece.find(text[0], position)
                if position < 0:
                    break
            while state and text[state] != piece[position]:
                state = self._border(state)
            state += text[state] == piece[position]
            position += 1
            if state == len(text):
                return position
        self.state = state
        return -1

    def _border(self, length: int) -> int:
        text, borders = self.text, self._borders
        while len(borders) < length:
            border, character = borders[-1], text[len(borders)]
            while border and text[border] != character:
                border = borders[border - 1]
            borders.append(border + (text[border] == character))
        return borders[length - 1]


class StopMatcher:
    """Receives pieces of text, returns the text that is safe to send.

    Text that may be the beginning of a stop string is held back until the next piece decides. Of several matches the
    one that ends first is taken (the longest of several), so the result does not depend on how the text was split.

        >>> matcher = StopMatcher(["END"])
        >>> matcher.push("the E"), matcher.push("ND of it"), matcher.matched
        ('the ', '', True)
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """stops: none is empty."""
        self._stops = [_Stop(stop) for stop in stops]
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
        before, text = len(self._held), self._held + piece
        ends = [(end, before + end - len(stop.text)) for stop in self._stops if (end := stop.push(piece)) >= 0]
        if ends:
            self.matched = True
            self._held = ""
            return text[: min(ends)[1]]
        shown = len(text) - max((stop.state for stop in self._stops), default=0)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """The text still held back: it was no stop string after all."""
        for stop in self._stops:
            stop.state = 0
        held, self._held = self._held, ""
        return held
