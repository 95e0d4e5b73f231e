"""One log configuration for every process: lines on stderr, and a file per process. No prompts, no keys."""

import contextlib
import io
import json
import logging
import os
import sys
import textwrap
import threading
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TextIO

import structlog


class LossyFile(io.FileIO):
    """Drops data that cannot be written."""

    def write(self, data: "bytes | bytearray | memoryview") -> int:  # type: ignore[override]
        """Returns the number of bytes written or dropped."""
        try:
            return super().write(data) or 0
        except OSError:
            return len(data)


Record = Mapping[str, Any]
LogFormat = Literal["text", "json"]

_PART_WIDTH = 10
_OWN = ("timestamp", "level", "part", "replica", "event", "exception")  # the rest of a record are facts
_RESET = "\x1b[0m"
_DIM, _CYAN, _YELLOW, _RED = ("\x1b[2m", "\x1b[36m", "\x1b[33m", "\x1b[31m")
_COLOURS = {"warning": _YELLOW, "error": _RED, "critical": _RED}


def text_line(record: Record, *, date: bool = True, colour: bool = False, width: int | None = None) -> str:
    """Time (local), part, replica, sentence, facts; a traceback follows on separate lines. Ends with a newline.

    width: columns after which a sentence continues in the next line, below its beginning; None: one line.
    """
    moment = datetime.fromtimestamp(record["timestamp"])
    clock = moment.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] if date else moment.strftime("%H:%M:%S")
    part = f"{record['part']:<{_PART_WIDTH}}"
    level = record["level"]
    sentence = str(record["event"])
    if record.get("replica") and record["replica"] not in sentence:
        sentence = f"{record['replica']}: {sentence}"
    if level in _COLOURS and not colour:
        sentence = f"{'warning' if level == 'warning' else 'error'}: {sentence}"
    facts = ", ".join(f"{key}={value}" for key, value in record.items() if key not in _OWN)
    if facts:
        sentence += f" ({facts})"
    indent = len(clock) + len(part) + 2
    if width is not None:
        sentence = wrapped(sentence, width, indent)
    if colour:
        mark = _COLOURS.get(level, "")
        line = f"{_DIM}{clock}{_RESET} {_CYAN}{part}{_RESET} {mark}{sentence}{_RESET if mark else ''}\n"
    else:
        line = f"{clock} {part} {sentence}\n"
    return line + (f"{record['exception']}\n" if record.get("exception") else "")


def json_line(record: Record) -> str:
    """One JSON object; the time in UTC. Ends with a newline."""
    time = datetime.fromtimestamp(record["timestamp"], UTC).isoformat(timespec="milliseconds")
    own = {"timestamp": time} | {key: record[key] for key in _OWN if key != "timestamp" and record.get(key)}
    return json.dumps(own | {key: value for key, value in record.items() if key not in _OWN}, default=str) + "\n"


def wrapped(text: str, width: int, indent: int) -> str:
    """Text that starts in column `indent`, wrapped to `width` columns; a long word (a path) is not broken."""
    if indent + 20 > width:
        return text
    lines = textwrap.wrap(text, width - indent, break_long_words=False, break_on_hyphens=False)
    return ("\n" + " " * indent).join(lines)


MAX_BYTES = 16 << 20  # bytes of a file; one earlier file of this size is kept beside it
STDERR = 2


class LogFile:
    """A file for its owner alone (0600). Beyond `max_bytes` it becomes `NAME.1`, and a new one begins. Thread-safe."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES, redirect_stderr: bool = False) -> None:
        """redirect_stderr: file descriptor 2 becomes the file, so native code writes there, too. Raises OSError."""
        self.path = path
        self._max_bytes = max_bytes
        self._redirect_stderr = redirect_stderr
        self._lock = threading.RLock()  # a signal handler may log in the thread that holds it
        self._descriptor = self._open()

    def write(self, text: str) -> None:
        """Appends whole lines. On a full disk they are lost: a log error must not end the process."""
        data = text.encode("utf-8", "backslashreplace")
        with self._lock, contextlib.suppress(OSError):
            if os.fstat(self._descriptor).st_size + len(data) > self._max_bytes:
                self._rotate()
            os.write(self._descriptor, data)

    def _open(self) -> int:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if self._redirect_stderr:
            os.dup2(descriptor, STDERR)
        return descriptor

    def _rotate(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # removed, or moved by a rotation that could not open the next one
            os.replace(self.path, previous(self.path))
        full = self._descriptor
        self._descriptor = self._open()
        os.close(full)


def previous(path: Path) -> Path:
    """The path that a full file is moved to."""
    return path.with_name(path.name + ".1")


Level = Literal["debug", "info", "warning", "error"]

_NUMBERS = logging.getLevelNamesMapping()


@dataclass(frozen=True, slots=True)
class LogConfig:
    """The log settings of one process. Plain data: part of the configuration of routers, controllers and ranks."""

    part: str  # "serve", "controller", "router 2", "rank 0"
    replica: str = ""
    path: str = ""  # path of the process' log file; empty: stderr only
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
_sinks: list[Sink] = []  # sinks of this process
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
