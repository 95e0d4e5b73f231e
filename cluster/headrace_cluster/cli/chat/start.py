"""Starts a chat: interactive with an editor, or one answer to a text or to standard input."""

import json
import sys
from pathlib import Path
from typing import Any

from headrace_cluster.cli.api_client import ApiClient
from headrace_cluster.cli.chat.buffered_input import buffered_input
from headrace_cluster.cli.chat.chat_settings import ChatSettings
from headrace_cluster.cli.chat.conversation import Conversation
from headrace_cluster.cli.chat.session import ChatSession
from headrace_cluster.cli.chat.terminal import Terminal
from headrace_cluster.errors import ServerError, StateError
from headrace_cluster.launch.display import show_message
from headrace_cluster.program import program_name
from headrace_proto.errors import HeadraceError


class ChatInputError(HeadraceError):
    """Standard input is not a message, or a file has no tools."""


EMPTY = "the message is empty: there is nothing to answer"


def start_chat(
    client: ApiClient,
    *,
    once: str | None,
    model: str | None,
    system: str | None,
    fields: dict[str, Any],
    stats: bool,
    tools: Path | None = None,
) -> None:
    """`once` or a standard input that is not a terminal is one message; else a conversation. Raises HeadraceError.

    fields: settings of the requests; None = not given. tools: a file with the tools of the requests.
    """
    offered = _read_tools(tools) if tools is not None else []
    settings = ChatSettings(stats=stats)
    settings.replace_fields({name: value for name, value in fields.items() if value is not None})
    if once is None and sys.stdin is not None and sys.stdin.isatty():
        with buffered_input(sys.stdin):
            conversation = Conversation(_choose_model(model, client.models()), system or None, tools=offered)
            _run_interactive(client, conversation, settings)
        return
    text = once if once is not None else _read_input()
    if not text.strip():
        if once is not None:
            raise ServerError(EMPTY)
        show_message(EMPTY)  # as a conversation without a message, this is no failure
        return
    conversation = Conversation(model or _choose_model(None, client.models()), system or None, tools=offered)
    ChatSession(client, conversation, settings, Terminal()).answer(text)


def _read_tools(path: Path) -> list[dict[str, Any]]:
    try:
        tools = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ChatInputError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ChatInputError(f"{path} is not JSON") from error
    if not isinstance(tools, list):
        raise ChatInputError(f"{path} is not a list of tools, as the field 'tools' of /v1/chat/completions has them")
    return tools


def _run_interactive(client: ApiClient, conversation: Conversation, settings: ChatSettings) -> None:
    from headrace_cluster.cli.chat.editor import Editor
    from headrace_cluster.cli.chat.history import ChatHistory, open_history

    terminal = Terminal()
    terminal.show_header(conversation.model)
    try:
        history = open_history()
    except StateError as error:
        terminal.error(error)
        history = ChatHistory(None)
    session = ChatSession(client, conversation, settings, terminal)
    session.run(Editor(history, client.models))


def _choose_model(given: str | None, models: list[str]) -> str:
    if not models:
        raise ServerError(f"the server has no model yet; wait until it is ready ({program_name()} status)")
    if given is not None and given not in models:
        raise ServerError(f"the server has no model {given}; it has: {', '.join(models)}")
    return given or models[0]


def _read_input() -> str:
    content = sys.stdin.buffer.read() if sys.stdin is not None else b""
    try:
        return content.decode().strip("\r\n")
    except UnicodeDecodeError as error:
        raise ChatInputError("standard input is not UTF-8 text") from error
