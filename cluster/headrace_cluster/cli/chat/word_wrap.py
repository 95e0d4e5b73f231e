"""Breaks a stream of text between words, so that a terminal does not break it within them. Pure."""

from rich.cells import get_character_cell_size

# Control characters of an answer must not reach a terminal, which would interpret them.
_CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
_TAB = 8


class WordWrap:
    """Text in as it arrives, text out as it can be written. A word is buffered until its end is known.

    columns: of the terminal; wide characters count as two, and lines may break after each of them.
    """

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._column = 0
        self._gap = ""  # spaces before the word; they are left out where the line breaks
        self._word = ""
        self._word_width = 0

    def feed(self, text: str) -> str:
        """What can be written now."""
        out: list[str] = []
        for character in text.translate(_CONTROLS):
            if character == "\n":
                out.append(self.finish() + "\n")
                self._column, self._gap = 0, ""
            elif character in " \t":
                out.append(self.finish())
                self._gap += character if character == " " else " " * (_TAB - (self._column + len(self._gap)) % _TAB)
            else:
                width = get_character_cell_size(character)
                self._word += character
                self._word_width += width
                if width > 1 or self._word_width >= self._columns:
                    out.append(self.finish())
        return "".join(out)

    def finish(self) -> str:
        """The buffered word."""
        if not self._word:
            return ""
        gap, word, width = self._gap, self._word, self._word_width
        self._gap, self._word, self._word_width = "", "", 0
        if self._column > 0 and self._column + len(gap) + width > self._columns:
            self._column = width
            return f"\n{word}"
        self._column += len(gap) + width
        return gap + word


def wrap_text(text: str, columns: int) -> str:
    """A whole text with its lines broken between words."""
    wrap = WordWrap(columns)
    return wrap.feed(text) + wrap.finish()


def without_controls(text: str) -> str:
    """Text whose control characters a terminal would interpret."""
    return text.translate(_CONTROLS)
