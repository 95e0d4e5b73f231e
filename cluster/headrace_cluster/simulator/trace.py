"""Traces of requests: when each came, how long it was, and which blocks of its prompt others share."""

import csv
import gzip
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Annotated

import msgspec

from headrace_cluster.simulator.errors import TraceError

MOONCAKE_BLOCK = 512  # tokens of a block of `hash_ids`
PRIVATE = 1 << 40  # ids of blocks that no other request has begin here
MAX_BYTES = 1 << 30  # bytes of a trace's text
MAX_TOKENS = 1 << 31  # tokens of a request, with its answer
MAX_TIMESTAMP = 1 << 53  # milliseconds
MAX_DAYS = 366  # between the first and the last request
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")  # columns
_DIGITS = re.compile(r"[0-9]{1,12}")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A prompt consists of whole blocks of `Trace.block` tokens, of which the last one may be cut off."""

    arrival: float  # seconds since the start
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]  # equal ids: equal tokens
    session: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrivals."""

    name: str
    requests: Sequence[TraceRequest]
    block: int  # tokens of a block
    hashed: bool  # whether requests share blocks: without it there is nothing to reuse

    @property
    def seconds(self) -> float:
        """From the first arrival to the last one."""
        return self.requests[-1].arrival - self.requests[0].arrival if self.requests else 0.0

    @property
    def has_sessions(self) -> bool:
        return any(request.session for request in self.requests)

    def first(self, count: int) -> "Trace":
        return replace(self, requests=self.requests[:count])

    def faster(self, factor: float) -> "Trace":
        """The same requests, that many times as many of them per second."""
        return replace(self, requests=[replace(request, arrival=request.arrival / factor) for request in self.requests])


def token_ids(request: TraceRequest, block: int) -> list[int]:
    """The prompt: each block is its id, repeated. As hashes are chained, equal tokens elsewhere are no equal blocks."""
    tokens: list[int] = []
    for block_id in request.block_ids:
        tokens += [block_id & 0x3FFFFFFF] * block
    return tokens[: request.input_tokens]


def read_trace(path: Path, seed: int = 0) -> Trace:
    """A trace in Mooncake's JSON lines or in Azure's CSV, which gzip may have compressed. Raises TraceError."""
    lines = _text(path).split("\n")
    first = next((number for number, line in enumerate(lines) if line.strip()), None)
    if first is None:
        raise TraceError(f"The trace {path} is empty; name a file with requests.")
    try:
        if lines[first].lstrip().startswith("{"):
            return Trace(path.name, _mooncake(lines, Random(seed)), MOONCAKE_BLOCK, hashed=True)
        return Trace(path.name, _azure(lines, first), MOONCAKE_BLOCK, hashed=False)
    except _LineError as error:
        raise TraceError(f"The trace {path} cannot be used; {error}.") from None


class _LineError(Exception):
    """A line that is no request; the message begins with its number."""

    def __init__(self, index: int, sentence: object) -> None:
        super().__init__(f"line {index + 1}: {sentence}")


def _text(path: Path) -> str:
    """Raises TraceError."""
    try:
        with path.open("rb") as file:
            compressed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if compressed else path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        text = data.decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise TraceError(f"The trace {path} cannot be read ({error}); name a .jsonl or .csv file.") from None
    if len(data) > MAX_BYTES:
        raise TraceError(f"The trace {path} has more than {MAX_BYTES >> 20} MiB of text; cut it.")
    return text


def _mooncake(lines: Sequence[str], random: Random) -> list[TraceRequest]:
    """Times are in coarse steps: the requests of a step are spread until the next one."""
    requests = []
    for index, line in enumerate(lines):
        if line.strip():
            try:
                requests.append(_json_request(line))
            except (ValueError, msgspec.DecodeError) as error:
                raise _LineError(index, error) from None
    _check_span([request.arrival for request in requests])
    following = dict(pairwise(sorted({request.arrival for request in requests})))
    spread = []
    for request in requests:
        width = following.get(request.arrival, request.arrival + 1.0) - request.arrival
        late = random.random() * width if width > 0.1 else 0.0
        spread.append(replace(request, arrival=request.arrival + late))
    return sorted(spread, key=lambda request: request.arrival)


class _Row(msgspec.Struct):
    """A line of Mooncake's trace."""

    timestamp: Annotated[float, msgspec.Meta(ge=0, le=MAX_TIMESTAMP)]  # milliseconds
    input_length: int
    output_length: int
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0)]]
    session_id: str | int | None = None


def _json_request(line: str) -> TraceRequest:
    """Raises ValueError and msgspec.DecodeError."""
    row = msgspec.json.decode(line, type=_Row)
    session = "" if row.session_id is None else str(row.session_id)
    return _request(row.timestamp / 1e3, row.input_length, row.output_length, tuple(row.hash_ids), session)


def _azure(lines: Sequence[str], header: int) -> list[TraceRequest]:
    """No two requests share anything. Times without an offset are UTC."""
    columns = [name.strip() for name in lines[header].split(",")]
    places = [columns.index(name) if name in columns else -1 for name in _AZURE]
    if -1 in places:
        raise _LineError(
            header,
            "neither Mooncake's JSON (timestamp, input_length, output_length, hash_ids) nor the header of Azure's CSV "
            f"({', '.join(_AZURE)}): {_shown(lines[header].strip())}",
        )
    rows = []
    for index in range(header + 1, len(lines)):
        if lines[index].strip():
            try:
                rows.append(_csv_row(lines[index], places))
            except (ValueError, OverflowError, csv.Error) as error:
                raise _LineError(index, error) from None
    if not rows:
        raise _LineError(header, "no requests follow it")
    rows.sort()
    _check_span([at for at, _, _ in rows])
    requests = []
    block_id = PRIVATE
    for at, tokens, output in rows:
        count = -(-tokens // MOONCAKE_BLOCK)
        requests.append(_request(at - rows[0][0], tokens, output, tuple(range(block_id, block_id + count)), ""))
        block_id += count
    return requests


def _csv_row(line: str, places: Sequence[int]) -> tuple[float, int, int]:
    """Seconds since 1970, and the tokens of prompt and answer. Raises ValueError and csv.Error."""
    cells = next(csv.reader([line]))
    if len(cells) <= max(places):
        raise ValueError(f"it has {len(cells)} columns; the header has {', '.join(_AZURE)}")
    time, *lengths = (cells[place].strip() for place in places)
    try:
        at = datetime.fromisoformat(time)
    except ValueError:
        raise ValueError(f"TIMESTAMP is {_shown(time)}; it is a time such as 2023-11-16 18:17:03.9799600") from None
    for name, text in zip(_AZURE[1:], lengths, strict=True):
        if not _DIGITS.fullmatch(text):
            raise ValueError(f"{name} is {_shown(text)}; it is a whole number")
    tokens, output = map(int, lengths)
    _check_lengths(tokens, output)
    return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp(), tokens, output


def _request(arrival: float, tokens: int, output: int, block_ids: tuple[int, ...], session: str) -> TraceRequest:
    """Raises ValueError."""
    _check_lengths(tokens, output)
    if len(block_ids) != -(-tokens // MOONCAKE_BLOCK):
        raise ValueError(f"{len(block_ids)} hash_ids for {tokens} tokens; there is one for each {MOONCAKE_BLOCK}")
    return TraceRequest(arrival, tokens, max(1, output), block_ids, session)


def _check_lengths(tokens: int, output: int) -> None:
    if tokens < 1 or output < 0 or tokens + output > MAX_TOKENS:
        raise ValueError(f"{tokens} input and {output} output tokens; 1 to {MAX_TOKENS} together, at least 1 of input")


def _check_span(times: Sequence[float]) -> None:
    if (days := (max(times) - min(times)) / 86400) > MAX_DAYS:
        raise TraceError(f"The requests of the trace are {days:.0f} days apart; {MAX_DAYS} is the most.")


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 40 else f"{text[:40]!r} ..."
