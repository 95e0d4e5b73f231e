"""The slash commands: their effects, and the text that they print."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any, Protocol

from headrace_cluster.cli.chat.chat_settings import ChatSettingError, ChatSettings
from headrace_cluster.cli.chat.conversation import Conversation
from headrace_cluster.cli.chat.entry import Command
from headrace_cluster.cli.chat.transcript import load_transcript, save_transcript
from headrace_proto.errors import HeadraceError


class ChatCommandError(HeadraceError):
    """A command does not exist, or is used wrongly."""


class ModelCatalog(Protocol):
    """The models of a server, implemented by ApiClient. Both methods raise a HeadraceError when it does not answer."""

    def models(self) -> list[str]:
        """Their names."""
        ...

    def defaults(self, model: str) -> dict[str, Any]:
        """Default values of request fields, if the server lists them."""
        ...


class Next(Enum):
    """The step after a command."""

    PROMPT = auto()
    ANSWER = auto()
    END = auto()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The text that a command prints, and the next step."""

    text: str = ""
    next: Next = Next.PROMPT


@dataclass(frozen=True, slots=True)
class CommandHelp:
    """One line of /help; the first word of `usage` names the command."""

    usage: str
    help: str
    aliases: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.usage.split()[0].removeprefix("/")


COMMANDS = (
    CommandHelp("/help", "this list", ("?",)),
    CommandHelp("/clear", "remove the messages; system message and settings stay"),
    CommandHelp("/system [TEXT]", "show or set the system message; /system none removes it"),
    CommandHelp("/set [NAME VALUE]", "show or change settings: temperature, stats on, ..."),
    CommandHelp("/model [NAME]", "list the server's models, or switch to another"),
    CommandHelp("/show", "show model, system message, settings and messages"),
    CommandHelp("/retry", "ask the last message again"),
    CommandHelp("/save [--force] FILE", "write the conversation as JSON; --force replaces FILE"),
    CommandHelp("/load FILE", "continue a conversation that was saved"),
    CommandHelp("/bye", "leave; also /exit, /quit or Ctrl-D", ("exit", "quit")),
)
_NAMES = {name: entry.name for entry in COMMANDS for name in (entry.name, *entry.aliases)}
_KEYS = (
    ("Enter", "send"),
    ("Alt-Enter", "new line; so does Enter after a backslash"),
    ('"""', "begin and end a message of several lines"),
    ("Tab, Up, Ctrl-R", "complete, recall, search what was entered before"),
    ("Ctrl-C", "end a running answer, or clear the line"),
    ("Ctrl-D", "leave"),
    ("// or a space first", "send a message that starts with a slash"),
)
_FORCE = "--force"


class Commands:
    """Runs commands on a conversation and its settings."""

    def __init__(self, conversation: Conversation, settings: ChatSettings, server: ModelCatalog) -> None:
        self._conversation = conversation
        self._settings = settings
        self._server = server
        self._run: dict[str, Callable[[str], Outcome]] = {
            "help": self._help,
            "clear": self._clear,
            "system": self._system,
            "set": self._set,
            "model": self._model,
            "show": self._show,
            "retry": self._retry,
            "save": self._save,
            "load": self._load,
            "bye": self._bye,
        }

    def run(self, command: Command) -> Outcome:
        """Raises a HeadraceError with a sentence for the user; nothing is changed then."""
        name = _NAMES.get(command.name)
        if name is None:
            raise ChatCommandError(_unknown(command.name))
        return self._run[name](command.argument)

    def _help(self, argument: str) -> Outcome:
        commands = [(entry.usage, entry.help) for entry in COMMANDS]
        return Outcome(f"{_table(commands)}\n\n{_table(_KEYS)}")

    def _clear(self, argument: str) -> Outcome:
        _refuse_argument("/clear", argument)
        self._conversation.clear()
        return Outcome("The conversation is empty.")

    def _system(self, argument: str) -> Outcome:
        if argument:
            self._conversation.system = None if argument == "none" else argument
        return Outcome(_system_line(self._conversation))

    def _set(self, argument: str) -> Outcome:
        if not argument:
            return Outcome(_table(self._setting_rows()))
        name, *value = argument.split(maxsplit=1)
        if value:
            self._settings.set(name, value[0])
        rows = dict(self._setting_rows())
        if name not in rows:
            raise ChatSettingError(f"there is no setting {name[:40]}; there are: {', '.join(rows)}")
        return Outcome(f"{name} is {rows[name]}")

    def _setting_rows(self) -> list[tuple[str, str]]:
        try:
            defaults = self._server.defaults(self._conversation.model)
        except HeadraceError:
            defaults = {}  # settings can be changed while the server does not answer
        return self._settings.rows(defaults)

    def _model(self, argument: str) -> Outcome:
        names = self._server.models()
        if not argument:
            marks = [("*" if name == self._conversation.model else " ", name) for name in names]
            return Outcome("\n".join(f"{mark} {name}" for mark, name in marks))
        if argument not in names:
            raise ChatCommandError(f"the server has no model {argument[:80]}; it has: {', '.join(names) or 'none yet'}")
        self._conversation.model = argument
        return Outcome(f"The model is {argument}; the conversation continues.")

    def _show(self, argument: str) -> Outcome:
        _refuse_argument("/show", argument)
        rows = [("model", self._conversation.model), ("messages", str(len(self._conversation.messages)))]
        return Outcome(f"{_table([*rows, *self._setting_rows()])}\n{_system_line(self._conversation)}")

    def _retry(self, argument: str) -> Outcome:
        _refuse_argument("/retry", argument)
        if not self._conversation.prepare_retry():
            raise ChatCommandError("there is no message to ask again")
        return Outcome(next=Next.ANSWER)

    def _save(self, argument: str) -> Outcome:
        replace = argument.split(maxsplit=1)[:1] == [_FORCE]
        path = _path("/save", argument.removeprefix(_FORCE) if replace else argument)
        if not self._conversation.request_messages():
            raise ChatCommandError("there is nothing to save yet")
        save_transcript(path, self._conversation, self._settings, replace=replace)
        return Outcome(f"The conversation is in {path}, as a request to /v1/chat/completions.")

    def _load(self, argument: str) -> Outcome:
        path = _path("/load", argument)
        model = load_transcript(path, self._conversation, self._settings)
        text = f"{len(self._conversation.messages)} messages from {path}"
        if self._conversation.pending is not None:
            text += "; the last one has no answer: /retry asks it"
        if model is not None and model != self._conversation.model:
            text += f"; they were with {model}, the model here is {self._conversation.model}"
        return Outcome(f"{text}.")

    def _bye(self, argument: str) -> Outcome:
        return Outcome(next=Next.END)


def _unknown(name: str) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, _NAMES, n=1)
    hint = f"did you mean /{close[0]}?" if close else "/help lists them."
    return (
        f"there is no command /{name[:40]}; {hint} To send a message that starts with a slash, put // or a space first"
    )


def _refuse_argument(command: str, argument: str) -> None:
    if argument:
        raise ChatCommandError(f"{command} takes no argument")


def _path(command: str, argument: str) -> Path:
    if not argument.strip():
        raise ChatCommandError(f"name the file: {command} FILE")
    if "\0" in argument:
        raise ChatCommandError("a file's name cannot hold a null character")
    try:
        return Path(argument.strip()).expanduser()
    except RuntimeError:  # ~name with an unknown user
        raise ChatCommandError(f"{argument.strip()} is in the folder of a user who does not exist") from None


def _system_line(conversation: Conversation) -> str:
    return f"system message: {conversation.system}" if conversation.system else "There is no system message."


def _table(rows: "list[tuple[str, str]] | tuple[tuple[str, str], ...]") -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows)
