"""Wrong usage of the command line as one sentence, with the most similar option or command."""

import re
from difflib import get_close_matches
from typing import Any

import typer

from headrace_cluster.program import program_name
from headrace_cluster.spec.plain_words import plain

UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # not exported; typer raises it for any wrong usage

# Commands of other tools, and their equivalents here.
FOREIGN_COMMANDS = {
    "run": "here it is serve, then chat",
    "start": "here it is serve",
    "up": "here it is serve",
    "launch": "here it is serve",
    "launch_server": "here it is serve",
    "ps": "here it is status",
    "list": "here it is status",
    "ls": "here it is status",
    "pull": "serve downloads a model that is not on this machine",
    "download": "serve downloads a model that is not on this machine",
    "log": "here it is logs",
    "down": "here it is stop",
    "complete": "here it is chat --once TEXT",
    "help": "here it is --help",
}


def usage_sentence(error: Any) -> str:
    """For an instance of UsageError."""
    if error.ctx is None:  # the message names the option
        return _lower(error.format_message()).rstrip(".")
    command = error.ctx.command_path.split(" ", 1)[1:]
    help_line = " ".join([program_name(), *command, "--help"])
    kind = type(error).__name__
    if kind == "NoSuchOption":
        options = {name for param in error.ctx.command.params for name in param.opts if name.startswith("--")}
        return f"no such option {error.option_name}{_meant(error.option_name, options, help_line)}"
    if kind == "MissingParameter":
        sentence = _lower(error.format_message().replace("'", "")).rstrip(".")
        return f"{sentence} ({help_line} explains it)"
    if kind == "BadParameter":
        prefix = "" if error.param is None else f"{'/'.join(error.param.opts)}: "
        return prefix + plain(str(error.message))
    commands = getattr(error.ctx.command, "commands", None)
    if commands is not None and error.message.startswith("No such command"):
        name = error.message.split("'")[1]
        if not command and name in FOREIGN_COMMANDS:
            return f"no such command {name}; {FOREIGN_COMMANDS[name]} ({help_line} lists all)"
        return f"no such command {name}{_meant(name, commands, help_line)}"
    extra = re.fullmatch(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", error.message)
    sentence = f"unexpected argument {extra[1]}" if extra else _lower(error.format_message()).rstrip(".")
    return f"{sentence} ({help_line} explains it)"


def _meant(name: str, known: Any, help_line: str) -> str:
    close = get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {close[0]}? ({help_line} lists all)" if close else f" ({help_line} lists all)"


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]
