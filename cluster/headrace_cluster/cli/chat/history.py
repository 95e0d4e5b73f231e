"""Entries of earlier chats: one JSON string per line, in the state folder, readable by its owner only."""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from prompt_toolkit.history import History

from headrace_cluster.errors import StateError
from headrace_cluster.local.state import home, write_private

FILE_NAME = "chat-history"
MAX_ENTRY_BYTES = 64 << 10  # of one entry; a longer one can be recalled in the same chat only
MAX_FILE_BYTES = 1 << 20


class ChatHistory(History):
    """History of all chats of this user. If the file cannot be written, this chat's entries can still be recalled."""

    def __init__(self, path: Path | None) -> None:
        super().__init__()
        self._path = path

    def load_history_strings(self) -> Iterable[str]:
        """Newest first."""
        return reversed(_read(self._path)) if self._path is not None else []

    def store_string(self, string: str) -> None:
        line = _encode(string)
        if self._path is None or len(line) > MAX_ENTRY_BYTES:
            return
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "ab", buffering=0) as file:
                file.write(line)
        except OSError:
            self._path = None


def open_history() -> ChatHistory:
    """The history in the state folder, bounded in size. Raises StateError when the folder cannot be used."""
    path = home() / FILE_NAME
    try:
        if path.exists():
            path.chmod(0o600)
            if path.stat().st_size > MAX_FILE_BYTES:
                write_private(path, _newest(_read(path), MAX_FILE_BYTES // 2))
    except OSError as error:
        raise StateError(f"{path} cannot be used: {error.strerror}") from error
    return ChatHistory(path)


def _newest(entries: list[str], limit: int) -> str:
    """The newest entries as lines of at most `limit` bytes."""
    kept: list[bytes] = []
    size = 0
    for entry in reversed(entries):
        line = _encode(entry)
        size += len(line)
        if size > limit:
            break
        kept.append(line)
    return b"".join(reversed(kept)).decode()


def _read(path: Path) -> list[str]:
    """Oldest first. An incomplete line, for example after a full disk, is skipped."""
    entries: list[str] = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return entries
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, str):
            entries.append(entry)
    return entries


def _encode(entry: str) -> bytes:
    return json.dumps(entry).encode() + b"\n"
