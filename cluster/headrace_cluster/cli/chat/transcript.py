"""A conversation in a file: the JSON body of a request to /v1/chat/completions, so that other clients can send it."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from headrace_cluster.cli.chat.chat_settings import ChatSettingError, ChatSettings
from headrace_cluster.cli.chat.conversation import Conversation
from headrace_cluster.errors import StateError
from headrace_cluster.local.state import write_private
from headrace_proto.errors import HeadraceError

MAX_BYTES = 64 << 20
ROLES = ("system", "developer", "user", "assistant", "tool")
_KEPT = ("role", "content", "tool_calls", "tool_call_id")


class TranscriptError(HeadraceError):
    """A conversation cannot be written, or a file is not a conversation."""


def save_transcript(path: Path, conversation: Conversation, settings: ChatSettings, *, replace: bool) -> None:
    """Writes a file for its owner only. An existing file is an error unless `replace`. Raises TranscriptError."""
    document = {
        "model": conversation.model,
        "messages": conversation.request_messages(),
        **({"tools": list(conversation.tools)} if conversation.tools else {}),
        **settings.request_fields(),
    }
    text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    text = text.encode("utf-8", "replace").decode()  # JSON escapes can hold half of a surrogate pair
    try:
        if replace:
            write_private(path, text)
        else:
            _write_new(path, text)
    except FileExistsError:
        raise TranscriptError(f"{path} exists; choose another name, or replace it: /save --force {path}") from None
    except OSError as error:
        raise TranscriptError(f"{path} cannot be written: {error.strerror}") from error
    except StateError as error:
        raise TranscriptError(str(error)) from error


def load_transcript(path: Path, conversation: Conversation, settings: ChatSettings) -> str | None:
    """Replaces messages, system message and settings by those of a file; returns the file's model.

    Raises TranscriptError and then changes nothing.
    """
    document = _read(path)
    model, messages, tools = (document.pop(name, None) for name in ("model", "messages", "tools"))
    if not (model is None or isinstance(model, str)) or not isinstance(messages, list) or not messages:
        raise TranscriptError(f"{path} is not a conversation: it has no list of messages")
    if not all(_is_message(message) for message in messages):
        raise TranscriptError(f"{path} is not a conversation: each message needs a role and a content, both text")
    if tools is not None and not isinstance(tools, list):
        raise TranscriptError(f"{path} is not a conversation: its tools are no list")
    try:
        settings.replace_fields(document)
    except ChatSettingError as error:
        raise TranscriptError(f"{path} cannot be used: {error}") from error
    plain = [{name: message[name] for name in _KEPT if name in message} for message in messages]
    conversation.system = plain.pop(0)["content"] if plain[0]["role"] == "system" else None
    conversation.pending = plain.pop()["content"] if plain and plain[-1]["role"] == "user" else None
    conversation.messages = plain
    conversation.open_calls = _open_calls(plain)
    conversation.tools = tools or ()
    return model


def _open_calls(messages: list[dict[str, Any]]) -> list[str]:
    """Ids of the last answer's calls that have no result."""
    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers or any(message["role"] == "user" for message in messages[answers[-1] :]):
        return []
    answered = {message.get("tool_call_id") for message in messages[answers[-1] :]}
    calls = messages[answers[-1]].get("tool_calls") or []
    idents = [str(call.get("id")) for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return [ident for ident in idents if ident not in answered]


def _write_new(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise TranscriptError(f"{path} is larger than {MAX_BYTES >> 20} MiB")
        document = json.loads(content)
    except OSError as error:
        raise TranscriptError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise TranscriptError(f"{path} is not JSON") from error
    if not isinstance(document, dict):
        raise TranscriptError(f"{path} is not a conversation: it must hold one JSON object")
    return document


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and message["role"] in ROLES
        and isinstance(message.get("content"), str)
        and (message["role"] != "tool" or isinstance(message.get("tool_call_id"), str))
    )
