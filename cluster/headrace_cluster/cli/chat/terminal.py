"""Output of a chat: answers to stdout, everything else to stderr."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

from headrace_cluster.cli.chat.buffered_input import bracketed_paste
from headrace_cluster.cli.chat.word_wrap import WordWrap, without_controls, wrap_text

_BOLD, _DIM, _RED, _RESET = "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[0m"
_MIN_COLUMNS = 20


class Terminal:
    """On a terminal, breaks lines between words and removes control characters; elsewhere text is unchanged."""

    def __init__(self) -> None:
        self._out: TextIO = sys.stdout
        self._notes: TextIO = sys.stderr
        self._thinking = False  # the last thing printed
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # not every locale can show an answer
        self._colored = self._notes.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    @contextlib.contextmanager
    def answer(self) -> Iterator[Callable[[str], None]]:
        """Yields a function that prints a piece of an answer. Ends the line, unless it failed before any text."""
        wrap = WordWrap(_columns(self._out)) if self._out.isatty() else None
        failed_empty = True

        def write(text: str) -> None:
            nonlocal failed_empty
            failed_empty = False
            self._end_thought()
            self._out.write(wrap.feed(text) if wrap else text)
            self._out.flush()

        try:
            yield write
            failed_empty = False
        finally:
            if not failed_empty:
                self._out.write((wrap.finish() if wrap else "") + "\n")
                self._out.flush()

    def show_header(self, model: str) -> None:
        """The first line of a conversation."""
        self._print(f"{self._paint(model, _BOLD)}  ")
        self.note("/help lists commands, Ctrl-C ends an answer, Ctrl-D leaves")

    def show(self, text: str) -> None:
        """Prints the output of a command."""
        self._print(f"{self._wrapped(text)}\n")

    def note(self, text: str) -> None:
        """Prints a dimmed remark."""
        self._end_thought()
        self._print(f"{self._paint(self._wrapped(text), _DIM)}\n")

    def thought(self, text: str) -> None:
        """Prints a piece of the model's reasoning, dimmed."""
        self._print(self._paint(without_controls(text) if self._notes.isatty() else text, _DIM))
        self._thinking = True

    def error(self, error: Exception) -> None:
        """Prints the sentence of an error."""
        self._print(f"{self._paint(self._wrapped(f'headrace: {error}'), _RED)}\n")

    def bracketed_paste(self) -> contextlib.AbstractContextManager[None]:
        """Bracketed paste during an answer: the editor enables it only while its prompt is shown."""
        return bracketed_paste(self._notes)

    def _end_thought(self) -> None:
        if self._thinking:
            self._thinking = False
            self._print("\n\n")

    def _print(self, text: str) -> None:
        self._notes.write(text)
        self._notes.flush()

    def _paint(self, text: str, style: str) -> str:
        return f"{style}{text}{_RESET}" if self._colored and text else text

    def _wrapped(self, text: str) -> str:
        return wrap_text(text, _columns(self._notes)) if self._notes.isatty() else text


def _columns(stream: TextIO) -> int:
    try:
        return max(_MIN_COLUMNS, os.get_terminal_size(stream.fileno()).columns or 80)
    except OSError:
        return 80
