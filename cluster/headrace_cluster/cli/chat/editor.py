"""The prompt of an interactive chat: line editing, history, paste, completion."""

from collections.abc import Callable, Sequence

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import History
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output
from prompt_toolkit.output.defaults import create_output
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.shortcuts import CompleteStyle
from prompt_toolkit.utils import is_dumb_terminal

from headrace_cluster.cli.chat.completion import ChatCompleter
from headrace_cluster.cli.chat.entry import is_unfinished

_PROMPT = FormattedText([("bold", ">>> ")])


class Editor:
    """Reads entries, one after the other. keyboard and screen: None = those of this process."""

    def __init__(
        self,
        history: History,
        models: Callable[[], Sequence[str]],
        *,
        keyboard: Input | None = None,
        screen: Output | None = None,
    ) -> None:
        if screen is None and not is_dumb_terminal():
            # If stdout is a file for the answers, the prompt is shown on stderr.
            screen = create_output(always_prefer_tty=True)
            if isinstance(screen, Vt100_Output):
                screen.enable_cpr = False  # the terminal's response could arrive after the prompt has ended
        self._session: PromptSession[str] = PromptSession(
            _PROMPT,
            prompt_continuation=_continuation,
            multiline=True,  # otherwise a pasted line break would be shown as ^J
            history=history,
            completer=ChatCompleter(models),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            key_bindings=_key_bindings(),
            enable_suspend=True,
            input=keyboard,
            output=screen,
        )

    def read(self) -> str:
        """One entry; "" if Ctrl-C cleared it. On an empty line Ctrl-C raises KeyboardInterrupt, Ctrl-D EOFError."""
        entry = self._session.prompt()
        return entry.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # bytes that are not UTF-8


def _continuation(width: int, line_number: int, wrap_count: int) -> str:
    """The prefix of a further line of an entry; dots only after a line break that was entered, not after a wrap."""
    return "    " if wrap_count else "... "


def _key_bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.is_cursor_at_the_end and buffer.text.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        elif is_unfinished(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("c-c", filter=Condition(lambda: bool(get_app().current_buffer.text)))
    def _(event: KeyPressEvent) -> None:
        event.app.exit(result="")  # the typed text stays on the screen, as in a shell

    @bindings.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings
