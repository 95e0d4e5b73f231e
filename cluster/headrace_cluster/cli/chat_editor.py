"""The line editor of `headrace chat`."""

import contextlib
import sys
import termios
from collections.abc import Iterator, Sequence

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output.defaults import create_output
from prompt_toolkit.shortcuts import CompleteStyle
from prompt_toolkit.utils import is_dumb_terminal

from headrace_cluster.errors import StateError
from headrace_cluster.local.state import home


def make_editor(completions: Sequence[str]) -> PromptSession[str]:
    """Reads entries: "" if Ctrl-C cleared one; without text Ctrl-C raises KeyboardInterrupt, Ctrl-D EOFError."""
    return PromptSession(
        [("bold", ">>> ")],
        multiline=True,  # otherwise a pasted line break would be shown as ^J
        history=_history(),
        completer=WordCompleter(list(completions), sentence=True),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        key_bindings=_keys(),
        enable_suspend=True,
        # If stdout is a file for the answers, the prompt is shown on stderr.
        output=None if is_dumb_terminal() else create_output(always_prefer_tty=True),
    )


@contextlib.contextmanager
def quiet_keyboard() -> Iterator[None]:
    """Inside this context what is typed during an answer is not echoed into it; the next prompt reads it."""
    before, quiet = termios.tcgetattr(sys.stdin), termios.tcgetattr(sys.stdin)
    quiet[3] &= ~(termios.ICANON | termios.ECHO)
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


class _History(FileHistory):
    """Entries of all chats of this user. A full disk does not end a chat."""

    def store_string(self, string: str) -> None:
        with contextlib.suppress(OSError):
            super().store_string(string)


def _history() -> History:
    try:
        path = home() / "chat-history"
        path.touch(mode=0o600)
    except (OSError, StateError):  # this chat's entries can still be recalled
        return InMemoryHistory()
    return _History(path)


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c", filter=Condition(lambda: bool(get_app().current_buffer.text)))
    def _(event: KeyPressEvent) -> None:
        event.app.exit(result="")  # the typed text stays on the screen, as in a shell

    return keys
