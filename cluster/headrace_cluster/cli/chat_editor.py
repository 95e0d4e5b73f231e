"""The line editor of `headrace chat`."""

from collections.abc import Sequence

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.shortcuts import CompleteStyle

from headrace_cluster.local.state import home


def make_editor(completions: Sequence[str]) -> PromptSession[str]:
    """Reads entries: "" if Ctrl-C cleared one; without text Ctrl-C raises KeyboardInterrupt, Ctrl-D EOFError."""
    history = home() / "chat-history"  # entries of all chats of this user
    history.touch(mode=0o600)
    return PromptSession(
        [("bold", ">>> ")],
        multiline=True,  # otherwise a pasted line break would be shown as ^J
        history=FileHistory(history),
        completer=WordCompleter(list(completions), sentence=True),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        key_bindings=_keys(),
        enable_suspend=True,
    )


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
