"""Runs a chat: one answer to a text or to standard input, or a conversation."""

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace_cluster.cli.api_client import ApiClient
from headrace_cluster.cli.chat.commands import COMPLETIONS, choose_model, run_command
from headrace_cluster.cli.chat.conversation import DIM, RED, ChatError, Conversation, show
from headrace_proto.errors import HeadraceError


def start_chat(
    client: ApiClient,
    *,
    once: str | None,
    model: str | None,
    system: str | None,
    settings: dict[str, Any],
    stats: bool,
    tools: Path | None = None,
) -> None:
    """`once` or a standard input that is not a terminal is one message; else a conversation. Raises HeadraceError.

    settings: fields of the requests; None = not given. tools: a file with the tools of the requests.
    """
    fields = {name: value for name, value in settings.items() if value is not None}
    fields |= {"tools": _read_tools(tools)} if tools else {}
    fields |= {"stream_options": {"include_usage": True}} if stats else {}
    conversation = Conversation(client, model or "", system, fields)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # not every locale has an answer's characters
    if once is None and sys.stdin is not None and sys.stdin.isatty():
        _talk(conversation)
        return
    text = once if once is not None else _read_input()
    if not text.strip():
        if once is None:
            return  # as in a script without a terminal
        raise ChatError("the message is empty: there is nothing to answer")
    conversation.model = model or choose_model(None, client.models())
    conversation.ask(text)


def run_conversation(conversation: Conversation, read: Callable[[], str]) -> None:
    """Answers entries until the user leaves; a failure does not end the conversation. read: the next entry."""
    while True:
        if conversation.open_calls():
            show("(the next message is the result of the first call that has none)", DIM)
        try:
            entry = read().rstrip()
        except (EOFError, KeyboardInterrupt):
            return
        if entry in ("/bye", "/exit", "/quit"):
            return
        try:
            if entry.startswith("/"):
                show(run_command(entry, conversation))
            elif entry and conversation.ask(entry) == "length":
                show("(the limit of tokens is reached; /set max_tokens N changes it)", DIM)
        except HeadraceError as error:
            show(f"headrace: {error}", RED)
        except KeyboardInterrupt:
            show("(stopped; /retry asks again)", DIM)


def _talk(conversation: Conversation) -> None:
    from headrace_cluster.cli.chat.editor import make_editor, quiet_keyboard

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # restores the modes of the terminal
    with quiet_keyboard():
        models = conversation.client.models()
        conversation.model = choose_model(conversation.model or None, models)
        show(f"{conversation.model}: /help lists commands, Ctrl-C ends an answer, Ctrl-D leaves", DIM)
        run_conversation(conversation, make_editor([*COMPLETIONS, *(f"/model {name}" for name in models)]).prompt)


def _read_tools(path: Path) -> list[dict[str, Any]]:
    try:
        tools = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ChatError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(tools, list):
        raise ChatError(f"{path} is not a list of tools, as the field 'tools' of /v1/chat/completions has them")
    return tools


def _read_input() -> str:
    try:
        return sys.stdin.buffer.read().decode().strip("\r\n") if sys.stdin is not None else ""
    except UnicodeDecodeError as error:
        raise ChatError("standard input is not UTF-8 text") from error
