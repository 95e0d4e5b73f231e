"""Traces are read as they are, and what is no trace is refused with a sentence."""

import gzip
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace_cluster.simulator import trace as trace_module
from headrace_cluster.simulator.errors import TraceError
from headrace_cluster.simulator.generated import generated
from headrace_cluster.simulator.lru_bound import hit_rate_bound
from headrace_cluster.simulator.trace import Trace, TraceRequest, read_trace, token_ids

TRACES = Path(__file__).parents[4] / "shared" / "traces"
MOONCAKE = '{"timestamp": %d, "input_length": %d, "output_length": 5, "hash_ids": %s}\n'


def request(blocks: tuple[int, ...], tokens: int) -> TraceRequest:
    return TraceRequest(0.0, tokens, 1, blocks)


def test_mooncake(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE % (0, 600, "[1, 2]") + MOONCAKE % (3000, 512, "[1]") + MOONCAKE % (3000, 1, "[7]"))
    trace = read_trace(path)
    assert trace.requests[0].input_tokens == 600
    assert sorted(entry.input_tokens for entry in trace.requests) == [1, 512, 600]
    assert all(3.0 <= entry.arrival < 4.0 for entry in trace.requests[1:])
    assert trace.faster(2.0).seconds == pytest.approx(trace.seconds / 2)
    first = token_ids(trace.requests[0], trace.block)
    assert len(first) == 600 and first[:512] == token_ids(request((1,), 512), 512)


def test_azure(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.4799600,3180,8\n"
    )
    trace = read_trace(path)
    assert [entry.arrival for entry in trace.requests] == pytest.approx([0.0, 0.5])
    assert [(entry.input_tokens, entry.output_tokens) for entry in trace.requests] == [(4808, 10), (3180, 8)]
    assert hit_rate_bound(trace, 1 << 40) == 0.0


@pytest.fixture
def in_new_york(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_times_of_azure_do_not_depend_on_the_machine(tmp_path: Path, in_new_york: None) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-03-10 01:59:59.0000000,5,1\n2024-03-10 03:00:00.0000000,5,1\n"
        "2024-03-10 05:00:00.000000+02:00,5,1\n2024-03-10 03:00:01.500000+00:00,5,1\n"
    )
    assert [entry.arrival for entry in read_trace(path).requests] == pytest.approx([0.0, 3601.0, 3601.0, 3602.5])


def test_sessions_byte_order_marks_and_gzip_are_read(tmp_path: Path) -> None:
    text = MOONCAKE % (0, 600, "[1, 2]") + "\n" + MOONCAKE.replace("{", '{"session_id": "s", ', 1) % (1, 1, "[3]")
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(text.encode("utf-8-sig")))
    trace = read_trace(path)
    assert {entry.session for entry in trace.requests} == {"", "s"} and trace.has_sessions
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03,5,1\r\n", encoding="utf-8-sig")
    assert len(read_trace(path).requests) == 1


def test_a_compressed_trace_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "MAX_BYTES", 1 << 20)
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(b" " * (2 << 20)))
    with pytest.raises(TraceError, match="more than 1 MiB of text"):
        read_trace(path)
    path.write_bytes(gzip.compress(b"{}" * 1000)[:20])
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(path)


GOOD = '{"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [1]}'


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ('"timestamp": 0', '"timestamp": NaN', "NaN is no number"),
        ('"timestamp": 0', '"timestamp": Infinity', "Infinity is no number"),
        ('"timestamp": 0', '"timestamp": 1e300', "timestamp is '1e"),
        ('"timestamp": 0', '"timestamp": 1e400', "timestamp is 'Inf"),
        ('"timestamp": 0', '"timestamp": -1', "timestamp is '-1'"),
        ('"timestamp": 0', '"timestamp": true', "timestamp is 'true'"),
        ('"timestamp": 0', '"timestamp": "0"', "timestamp is '0'"),
        ('"input_length": 10', '"input_length": 10.5', "input_length is '10.5'; it is a whole number"),
        ('"input_length": 10', '"input_length": NaN', "NaN is no number"),
        ('"input_length": 10', '"input_length": true', "input_length is 'true'"),
        ('"input_length": 10', '"input_length": 4294967296', "input and 1 output tokens; 1 to 2147483648"),
        ('"output_length": 1', '"output_length": 2147483648', "output tokens; 1 to 2147483648"),
        ('"output_length": 1', '"output_length": null', "output_length is 'null'"),
        ("[1]", '["a"]', "hash_ids is"),
        ("[1]", "[-1]", "hash_ids is"),
        ("[1]", "[true]", "hash_ids is"),
        ("[1]", "7", "hash_ids is '7'"),
        ("[1]", "[1, 2]", "2 hash_ids for 10 tokens"),
        ("[1]", "[" * 100_000, "line 2: "),
        ('"hash_ids"', '"ids"', "hash_ids is missing"),
        ('"timestamp"', '"session_id": [], "timestamp"', "session_id is"),
        ("}", "", "no JSON"),
        ('"timestamp": 0', '"timestamp": 99999999999', "days apart"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, before: str, after: str, sentence: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{GOOD}\n{GOOD.replace(before, after)}\n")
    with pytest.raises(TraceError) as raised:
        read_trace(path)
    assert sentence in str(raised.value) and ("line 2: " in str(raised.value) or "days apart" in str(raised.value))


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("2023-11-16 18:17:03,5", "it has 2 columns"),
        ("2023-11-16 18:17:03,5.5,1", "ContextTokens is '5.5'"),
        ("2023-11-16 18:17:03,5,nan", "GeneratedTokens is 'nan'"),
        ("2023-11-16 18:17:03,-5,1", "ContextTokens is '-5'"),
        ("2023-11-16 18:17:03,0,1", "0 input and 1 output tokens"),
        ("2023-11-16 18:17:03,999999999999,1", "1 to 2147483648"),
        ("yesterday,5,1", "TIMESTAMP is 'yesterday'"),
    ],
)
def test_a_malformed_row_is_named(tmp_path: Path, line: str, sentence: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,5,1\n\n{line}\n")
    with pytest.raises(TraceError) as raised:
        read_trace(path)
    assert "line 4: " in str(raised.value) and sentence in str(raised.value)


@pytest.mark.parametrize("text", ["", " \n\t\n", "\ufeff"])
def test_a_trace_of_white_space_is_empty(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match="is empty; name a file with requests"):
        read_trace(path)


@pytest.mark.parametrize(
    "text", ["", "nothing", '{"timestamp": 0}', MOONCAKE % (0, 600, "[1]"), MOONCAKE % (0, 0, "[]")]
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match="The trace "):
        read_trace(path)
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "missing.jsonl")


def test_hits_of_one_lru_cache() -> None:
    requests = [request((1, 2), 1024), request((1, 2), 1024), request((3,), 512), request((1, 2, 4), 1025)]
    trace = Trace("t", requests, 512, hashed=True)
    total = 1024 + 1024 + 512 + 1025
    assert hit_rate_bound(trace, 100) == pytest.approx((512 + 1024) / total), "the last token is always computed"
    assert hit_rate_bound(trace, 2) == pytest.approx((512 + 512) / total), "block 2 is dropped for block 3"
    assert hit_rate_bound(trace, 1) == pytest.approx(512 / total), "the end of a prompt is dropped first"


def test_the_bound_is_of_the_simulated_blocks() -> None:
    shared = Trace("t", [request((1, 2), 600), request((1, 3), 600)], 512, hashed=True)
    assert hit_rate_bound(shared, 100) == pytest.approx(512 / 1200)
    assert hit_rate_bound(shared, 100, 64) == pytest.approx(512 / 1200)
    assert hit_rate_bound(shared, 100, 1024) == 0.0, "no whole block"
    same = Trace("t", [request((1, 2), 600), request((1, 2), 600)], 512, hashed=True)
    assert hit_rate_bound(same, 100, 16) == pytest.approx(592 / 1200)
    assert hit_rate_bound(same, 100, 100) == pytest.approx(500 / 1200), "the last token is always computed"
    assert hit_rate_bound(same, 100, 16, models=2) == 0.0
    moved = Trace("t", [request((1, 2), 1024), request((2, 1), 1024)], 512, hashed=True)
    assert hit_rate_bound(moved, 100, 16) == 0.0, "equal tokens after others are other blocks"
    chat = generated("Chat", 60, 0)
    assert hit_rate_bound(chat, 1 << 40, 64) == pytest.approx(hit_rate_bound(chat, 1 << 40))


@pytest.mark.skipif(not TRACES.exists(), reason="the traces are not here")
def test_the_traces_are_those_that_their_notes_describe() -> None:
    trace = read_trace(TRACES / "conversation_trace.head.jsonl")
    assert len(trace.requests) == 8365
    assert trace.seconds == pytest.approx(2535, abs=5)
    found = sum(len(entry.block_ids) for entry in trace.requests)
    seen: set[int] = set()
    hits = 0
    for entry in trace.requests:
        hits += sum(block in seen for block in entry.block_ids)
        seen.update(entry.block_ids)
    assert hits / found == pytest.approx(0.352, abs=0.001)
    assert len(read_trace(TRACES / "AzureLLMInferenceTrace_code.csv").requests) == 8819
