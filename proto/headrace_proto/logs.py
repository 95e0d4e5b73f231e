"""One log configuration for every process: lines on stderr, and a file per process. No prompts, no keys."""

import io
import logging
import os
import sys
import threading
import time
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TextIO

import structlog

from headrace_proto.log_file import STDERR, LogFile
from headrace_proto.log_line import LogFormat, Record, json_line, text_line
from headrace_proto.stderr import LossyFile

Level = Literal["debug", "info", "warning", "error"]

_NUMBERS = logging.getLevelNamesMapping()


@dataclass(frozen=True, slots=True)
class LogConfig:
    """The log settings of one process. Plain data: part of the configuration of routers, controllers and ranks."""

    part: str  # "serve", "controller", "router 2", "rank 0"
    replica: str = ""
    path: str = ""  # of its file; empty: stderr only
    format: LogFormat = "text"
    level: Level = "info"  # the lowest one that is written to the file
    stderr_level: Level = "info"


class StderrSink:
    """Writes records to the stderr that the process started with: a terminal, a service manager, Ray's worker log."""

    def __init__(self, config: LogConfig, stream: TextIO) -> None:
        self.stream = stream
        self._json = config.format == "json"
        self._least = _NUMBERS[config.stderr_level.upper()]
        self._file = config.path
        self._colour = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def write(self, record: Record, number: int) -> None:
        """Writes it, unless its level is too low. A traceback is only written where there is no file for it."""
        if number < self._least:
            return
        if self._file and record.get("exception"):
            record = {key: value for key, value in record.items() if key != "exception"} | {"traceback": self._file}
        line = json_line(record) if self._json else self._text(record)
        self.stream.write(line)
        self.stream.flush()

    def _text(self, record: Record) -> str:
        return text_line(record, date=False, colour=self._colour, width=_width(self.stream))


class FileSink:
    """Writes records to the process's file."""

    def __init__(self, config: LogConfig, file: LogFile) -> None:
        self._line = json_line if config.format == "json" else text_line
        self._least = _NUMBERS[config.level.upper()]
        self._file = file

    def write(self, record: Record, number: int) -> None:
        """Writes it, unless its level is too low."""
        if number >= self._least:
            self._file.write(self._line(record))


Sink = StderrSink | FileSink
_sinks: list[Sink] = []  # of this process
_stderr: TextIO | None = None  # once logs are configured: file descriptor 2 may be the log file then


def stderr() -> TextIO:
    """The stderr that the process started with; `sys.stderr` is the log file in a process that has one."""
    return _stderr or sys.stderr


def stderr_width() -> int | None:
    """Columns of the terminal behind `stderr`; None when it is no terminal."""
    return _width(stderr())


def configure_logs(config: LogConfig) -> None:
    """Configures the logs of a process, once; without a path they go to stderr until `add_log_file`."""
    global _stderr
    if _stderr is None:
        sys.stderr.flush()
        # Unbuffered: a signal handler logs, too, and a buffer raises when it is entered again. Data that cannot be
        # written is dropped: the terminal may be closed while the process shuts down.
        raw = LossyFile(os.dup(STDERR), "w")
        _stderr = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)
    _sinks[:] = [StderrSink(replace(config, path=""), stderr())]
    least = min(_NUMBERS[config.level.upper()], _NUMBERS[config.stderr_level.upper()])
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            _stamp(config),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(least),
        logger_factory=lambda *_names: _SinkLogger(_sinks),
        cache_logger_on_first_use=False,
    )
    # Records of libraries have the same format, errors only: a client's bad bytes must not fill the log.
    logging.basicConfig(level=logging.ERROR, handlers=[_LibraryHandler(config, _sinks)], force=True)
    if config.path:
        add_log_file(config)


def add_log_file(config: LogConfig) -> None:
    """Logs to `config.path`, too, from now on. File descriptor 2 becomes that file, so that native code writes there.

    If the file cannot be opened, only stderr is used, and a warning is logged.
    """
    path = Path(config.path)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = LogFile(path, redirect_stderr=True)
    except OSError as error:
        structlog.get_logger().warning(f"the log file {path} cannot be opened: {error.strerror}")
        return
    _sinks[:] = [FileSink(config, file), StderrSink(config, stderr())]
    sys.excepthook = _log_exception
    threading.excepthook = _log_thread_exception


def _width(stream: TextIO) -> int | None:
    return os.get_terminal_size(stream.fileno()).columns or None if stream.isatty() else None


def _stamp(config: LogConfig) -> Any:
    """The last processor: adds part, replica and time."""

    def add(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> dict[str, Any]:
        own = {"timestamp": time.time(), "part": config.part} | ({"replica": config.replica} if config.replica else {})
        return {"record": own | dict(event)}

    return add


class _SinkLogger:
    """The logger that structlog calls with a finished record."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks

    def msg(self, record: Record) -> None:
        number = _NUMBERS[record["level"].upper()]
        for sink in self._sinks:
            sink.write(record, number)

    debug = info = warning = error = critical = exception = msg


class _LibraryHandler(logging.Handler):
    """Converts records of the standard library's logging to the same format."""

    def __init__(self, config: LogConfig, sinks: Sequence[Sink]) -> None:
        super().__init__()
        self._config = config
        self._sinks = sinks

    def emit(self, record: logging.LogRecord) -> None:
        entry: dict[str, Any] = {
            "timestamp": record.created,
            "level": record.levelname.lower(),
            "part": self._config.part,
            "replica": self._config.replica,
            "event": record.getMessage(),
            "logger": record.name,
        }
        if record.exc_info:
            entry["exception"] = logging.Formatter().formatException(record.exc_info)
        for sink in self._sinks:
            sink.write(entry, record.levelno)


def _log_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    structlog.get_logger().error(f"unexpected {kind.__name__}: {error}", exc_info=(kind, error, trace))


def _log_thread_exception(entry: threading.ExceptHookArgs) -> None:
    if entry.exc_value is not None:
        _log_exception(entry.exc_type, entry.exc_value, entry.exc_traceback)
