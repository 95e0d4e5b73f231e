"""The logs of a process, configured in this one and restored afterwards."""

import io
import json
import logging
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from headrace_proto import logs
from headrace_proto.logs import LogConfig, add_log_file, configure_logs


@pytest.fixture(autouse=True)
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """The stderr of the process; everything that configuring changes is restored."""
    stderr = io.StringIO()
    monkeypatch.setattr(logs, "_stderr", stderr)
    monkeypatch.setattr(logs, "_sinks", [])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    root = logging.getLogger()
    level, handlers, config, descriptor = root.level, root.handlers[:], structlog.get_config(), os.dup(2)
    own_stderr = sys.stderr
    yield stderr
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stderr = own_stderr
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.configure(**config)


def _records(text: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in text.splitlines()]


def test_errors_of_libraries_have_the_same_format_and_their_warnings_are_dropped(stream: io.StringIO) -> None:
    configure_logs(LogConfig("router", format="json"))
    logging.getLogger("library").warning("a client sent bad bytes")
    try:
        raise ValueError("bad")
    except ValueError:
        logging.getLogger("library").exception("it failed")
    (record,) = _records(stream.getvalue())
    assert (record["part"], record["event"], record["logger"]) == ("router", "it failed", "library")
    assert record["exception"].endswith("ValueError: bad")


def test_the_file_gets_what_stderr_does_not_and_unexpected_errors(stream: io.StringIO, tmp_path: Path) -> None:
    path = tmp_path / "logs" / "serve.log"
    configure_logs(LogConfig("serve", path=str(path), format="json", stderr_level="error"))
    structlog.get_logger().info("a detail")
    try:
        raise RuntimeError("unforeseen")
    except RuntimeError as error:
        sys.excepthook(type(error), error, error.__traceback__)
        threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, None)))
    events = [record["event"] for record in _records(path.read_text())]
    assert events == ["a detail", *["unexpected RuntimeError: unforeseen"] * 2]
    shown = _records(stream.getvalue())
    assert [record["event"] for record in shown] == events[1:]
    assert shown[0]["traceback"] == str(path) and "exception" not in shown[0]


def test_without_the_file_stderr_is_used(stream: io.StringIO, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    configure_logs(LogConfig("serve", format="json"))
    add_log_file(LogConfig("serve", path=str(tmp_path / "file" / "serve.log"), format="json"))
    (record,) = _records(stream.getvalue())
    assert record["level"] == "warning" and "serve.log cannot be opened" in record["event"]
