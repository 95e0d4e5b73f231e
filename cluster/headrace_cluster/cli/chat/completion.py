"""Completion with Tab: commands, names of settings and models, files. `complete_words` is pure."""

from collections.abc import Callable, Iterable, Sequence

from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document

from headrace_cluster.cli.chat.chat_settings import DEFAULT, NAMES, STATS
from headrace_cluster.cli.chat.commands import COMMANDS
from headrace_proto.errors import HeadraceError


def complete_words(text: str, models: Sequence[str]) -> list[str]:
    """The words that can complete the last word of `text`."""
    command, *arguments = text.split(" ")
    if not arguments:
        names = [f"/{entry.name}" for entry in COMMANDS]
        return [name for name in names if text.startswith("/") and name.startswith(text)]
    candidates: Sequence[str] = ()
    if command == "/set" and len(arguments) == 1:
        candidates = NAMES
    elif command == "/set" and len(arguments) == 2:
        candidates = ("on", "off") if arguments[0] == STATS else (DEFAULT,)
    elif command == "/model" and len(arguments) == 1:
        candidates = models
    return [word for word in candidates if word.startswith(arguments[-1])]


class ChatCompleter(Completer):
    """Completes commands, not messages."""

    def __init__(self, models: Callable[[], Sequence[str]]) -> None:
        self._models = models
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        for command in ("/save --force ", "/save ", "/load "):
            if text.startswith(command):
                path = text.removeprefix(command)
                yield from self._paths.get_completions(Document(path, len(path)), complete_event)
                return
        last = text.rpartition(" ")[2]
        for word in complete_words(text, self._model_names() if text.startswith("/model ") else ()):
            yield Completion(word, start_position=-len(last))

    def _model_names(self) -> Sequence[str]:
        try:
            return self._models()
        except HeadraceError:
            return ()  # the server does not answer: the next message reports it
