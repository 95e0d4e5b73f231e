"""Ctrl-C during a conversation: it ends the current answer, not the chat. For the main thread."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType

RAISED_AGAIN_SECONDS = 0.2


@contextlib.contextmanager
def conversation_signals() -> Iterator[None]:
    """Inside this context SIGINT has no effect outside `one_interrupt`, and SIGTERM restores the terminal first."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the editor reads Ctrl-C as a key
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGALRM, _terminate)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def one_interrupt() -> Iterator[None]:
    """The first SIGINT raises KeyboardInterrupt here; a second one cannot interrupt the cleanup."""
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _terminate(number: int, frame: FrameType | None) -> None:
    # Inside of a destructor the exception is lost: then it is raised again.
    signal.setitimer(signal.ITIMER_REAL, RAISED_AGAIN_SECONDS)
    sys.exit(128 + signal.SIGTERM)
