"""Traces are read as they are, and what is no trace is refused with a sentence."""

import gzip
from pathlib import Path

import pytest

from headrace_cluster.simulator import trace as trace_module
from headrace_cluster.simulator.errors import TraceError
from headrace_cluster.simulator.result import hit_rate_bound
from headrace_cluster.simulator.trace import Trace, TraceRequest, read_trace, token_ids

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


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def test_azure(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 20:17:04.479960+02:00,3180,8\n"
    path.write_text(AZURE + rows, encoding="utf-8-sig")
    trace = read_trace(path)
    assert [entry.arrival for entry in trace.requests] == pytest.approx([0.0, 0.5])
    assert [(entry.input_tokens, entry.output_tokens) for entry in trace.requests] == [(4808, 10), (3180, 8)]
    assert hit_rate_bound(trace, 1 << 40) == 0.0


def test_a_compressed_trace_with_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = MOONCAKE % (0, 600, "[1, 2]") + "\n" + MOONCAKE.replace("{", '{"session_id": "s", ', 1) % (1, 1, "[3]")
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(text.encode("utf-8-sig")))
    trace = read_trace(path)
    assert {entry.session for entry in trace.requests} == {"", "s"} and trace.has_sessions
    monkeypatch.setattr(trace_module, "MAX_BYTES", 1 << 20)
    path.write_bytes(gzip.compress(b" " * (2 << 20)))
    with pytest.raises(TraceError, match="more than 1 MiB of text"):
        read_trace(path)


GOOD = '{"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [1]}'


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "cannot be read"),
        (" \n\t\n", "is empty; name a file with requests"),
        ("nothing", "neither Mooncake's JSON"),
        (f"{GOOD}\n{GOOD.replace('0', 'NaN', 1)}", "line 2: "),
        (GOOD.replace("0", "-1", 1), "line 1: "),
        (GOOD.replace("10", "10.5"), "$.input_length"),
        (GOOD.replace("10", "4294967296"), "input and 1 output tokens; 1 to 2147483648"),
        (GOOD.replace("[1]", "[1, 2]"), "2 hash_ids for 10 tokens"),
        (GOOD.replace("hash_ids", "ids"), "missing required field `hash_ids`"),
        (f"{GOOD}\n{GOOD.replace('0', '99999999999', 1)}", "days apart"),
        (f"{AZURE}2023-11-16 18:17:03,5,1\n\n2023-11-16 18:17:03,5", "line 4: it has 2 columns"),
        (f"{AZURE}2023-11-16 18:17:03,5.5,1", "ContextTokens is '5.5'"),
        (f"{AZURE}2023-11-16 18:17:03,0,1", "0 input and 1 output tokens"),
        (f"{AZURE}yesterday,5,1", "TIMESTAMP is 'yesterday'"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path: Path, text: str | None, sentence: str) -> None:
    path = tmp_path / "trace"
    if text is not None:
        path.write_text(text)
    with pytest.raises(TraceError) as raised:
        read_trace(path)
    assert sentence in str(raised.value)


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
