"""The formats of a log record: a line of text, or a JSON object."""

import json
import textwrap
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

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
