"""Buffers input that is typed or pasted while no prompt is shown: no echo, and the next prompt reads all of it.

A terminal in line mode would echo it into the answer, and would discard more than 4,095 characters of a line.
"""

import contextlib
import os
import termios
from collections.abc import Iterator
from typing import TextIO

_PASTE_ON = "\x1b[?2004h"
_PASTE_OFF = "\x1b[?2004l"


@contextlib.contextmanager
def buffered_input(keyboard: TextIO) -> Iterator[None]:
    """Inside this context keys are buffered for the next prompt; Ctrl-C still interrupts."""
    before = termios.tcgetattr(keyboard)
    buffered = termios.tcgetattr(keyboard)
    buffered[0] &= ~termios.ICRNL
    buffered[3] &= ~(termios.ICANON | termios.ECHO)
    termios.tcsetattr(keyboard, termios.TCSANOW, buffered)
    try:
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


@contextlib.contextmanager
def bracketed_paste(screen: TextIO) -> Iterator[None]:
    """Inside this context the terminal marks a paste (bracketed paste); the next prompt reads it as one entry."""
    if not screen.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        yield
        return
    _write(screen, _PASTE_ON)
    try:
        yield
    finally:
        _write(screen, _PASTE_OFF)


def _write(screen: TextIO, text: str) -> None:
    screen.write(text)
    screen.flush()
