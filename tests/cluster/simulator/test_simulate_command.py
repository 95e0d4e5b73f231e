"""`headrace simulate` as its user runs it."""

import json
import math
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from headrace_cluster.cli import main
from headrace_cluster.simulator import command, output
from headrace_cluster.simulator.errors import SimulationError
from headrace_cluster.simulator.latency_model import latency_model
from headrace_cluster.simulator.result import Result
from headrace_cluster.simulator.simulation import Simulation


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["headrace", "simulate", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(str(ended.value.code or 0))


def test_results_are_shown_and_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    assert not run(monkeypatch, "--trace", "chat", "--limit", "30", "--replicas", "2", "--out", str(folder))
    shown = capsys.readouterr().out
    for word in ("hit rate", "TTFT", "TPOT", "goodput", "imbalance", "decision", "h200-8b: by arithmetic"):
        assert word in shown
    result = json.loads((folder / "result.json").read_text())
    assert result["requests"] == 30
    assert result["hit_rate"] <= result["hit_rate_bound"], "the caches are so large that nothing is dropped"
    for name in ("ttft_seconds", "tpot_seconds", "decision_ms"):
        assert result[name]["p50"] <= result[name]["p90"] <= result[name]["p99"]
    assert {"goodput", "largest_share"} <= result.keys()
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "report.html").read_text()
    assert "data:image/png;base64," in page and "http" not in page.replace("http-equiv", "")


def test_a_trace_without_hashes_has_no_hit_rate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,480,10\n")
    assert not run(monkeypatch, "--trace", str(path), "--replicas", "1")
    assert "the trace has no hashes" in capsys.readouterr().out


def test_a_load_is_a_share_of_what_round_robin_serves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = []
    for load in ("0.5", "1.0"):
        assert not run(monkeypatch, "--trace", "chat", "--limit", "60", "--replicas", "2", "--load", load, "--json")
        rates.append(json.loads(capsys.readouterr().out)["arrivals_per_second"])
    assert rates[1] == pytest.approx(2 * rates[0])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--trace", "nothing"], "There is no trace 'nothing'"),
        (["--policy", "best"], "There is no policy 'best'"),
        (["--policy", "power_of_two"], "Predicted, the default, knows the KV caches and the load: leave --policy out."),
        (["--latency", "b200"], "There is no latency model 'b200'"),
        (["--latency", "missing.json"], "cannot be read"),
        (["--faults", "x"], "'x' is no fault"),
        (["--faults", "kill:m0-r9@1+2"], "no replica m0-r9 for a fault; there are m0-r0, m0-r1,"),
        (["--faults", "slow:m0-r1@1+2x0"], "the factor is above 0"),
        (["--faults", "slow:m0-r1@1.2.3+2x4"], "a number that cannot be read"),
        (["--speed", "0"], "--speed is above 0"),
        (["--speed", "-1"], "--speed is above 0"),
        (["--speed", "nan"], "--speed is above 0"),
        (["--load", "nan"], "--load is a share above 0"),
        (["--load", "0"], "--load is a share above 0"),
        (["--load", "-1"], "--load is a share above 0"),
        (["--spread", "nan"], "The spread is nan"),
        (["--spread", "-1"], "The spread is -1"),
        (["--slo-ttft", "-1"], "are seconds above 0"),
        (["--slo-ttft", "inf"], "are seconds above 0"),
        (["--slo-tpot", "nan"], "are seconds above 0"),
        (["--replicas", "0"], "at least one replica"),
        (["--prefill", "2"], "at least one replica"),
    ],
)
def test_wrong_values_are_found_before_the_trace_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    trace = [] if "--trace" in arguments else ["--trace", "missing.jsonl"]
    assert run(monkeypatch, *trace, *arguments) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (["--trace", "missing.jsonl"], 1, "cannot be read"),
        (["--trace", "chat", "--limit", "5", "--out", "/dev/null/out"], 1, "cannot be written"),
        (["--trace", "chat", "--limit", "5", "--cache-blocks", "1"], 1, "pass --cache-blocks"),
        (["--trace", "chat", "--limit", "1", "--load", "1"], 2, "--load needs a trace with several arrivals"),
    ],
)
def test_errors_are_sentences(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
    sentence: str,
) -> None:
    assert run(monkeypatch, *arguments) == status
    assert sentence in " ".join(capsys.readouterr().err.split())


def _trace(path: Path, line: str, count: int) -> str:
    path.write_text("".join(line % {"at": 1000 * number, "id": number} + "\n" for number in range(count)))
    return str(path)


PLAIN = '{"timestamp": %(at)d, "input_length": 600, "output_length": 5, "hash_ids": [1, %(id)d]}'


def test_the_policy_session_needs_sessions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = _trace(tmp_path / "t.jsonl", PLAIN, 8)
    assert run(monkeypatch, "--trace", trace, "--policy", "Session") == 2
    assert "have no sessions" in capsys.readouterr().err
    trace = _trace(tmp_path / "t.jsonl", PLAIN.replace("{", '{"session_id": "one", ', 1), 8)
    assert not run(monkeypatch, "--trace", trace, "--policy", "Session", "--replicas", "4", "--json")
    result = json.loads(capsys.readouterr().out)
    assert result["largest_share"] == 1.0 and result["policy"] == "session"


def test_the_bound_holds_for_smaller_blocks_than_the_trace_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = _trace(tmp_path / "t.jsonl", PLAIN.replace("%(id)d", "2"), 12)
    assert not run(monkeypatch, "--trace", trace, "--replicas", "1", "--block-size", "16", "--json")
    result = json.loads(capsys.readouterr().out)
    assert result["hit_rate"] == pytest.approx(result["hit_rate_bound"]) == pytest.approx(11 / 12 * 592 / 600)


def test_a_result_contains_what_was_simulated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    faults = "kill:m0-r1@60+20,slow:m1-r0@3+6x4,add:m0-r0@90"
    options = [
        "--trace", "CHAT", "--limit", "20", "--replicas", "1", "--prefill", "1", "--decode", "2", "--models", "2",
        "--spread", "0.1", "--seed", "3", "--routers", "2", "--block-size", "32", "--disaggregation", "always",
        "--speed", "2", "--faults", faults, "--out", str(tmp_path),
    ]  # fmt: skip
    assert not run(monkeypatch, *options)
    shown = capsys.readouterr().out
    setup = json.loads((tmp_path / "result.json").read_text())["setup"]
    expected = {
        "policy": "predicted", "replicas": 1, "prefill": 1, "decode": 2, "disaggregation": "always", "routers": 2,
        "models": 2, "spread": 0.1, "cache_blocks": 25_000, "block_size": 32, "faults": faults, "seed": 3, "limit": 20,
        "speed": 2.0, "load": None,
    }  # fmt: skip
    assert expected.items() <= setup.items() and setup["latency"] == asdict(latency_model("h200-8b"))
    assert "cache        25000 blocks of 32 tokens per replica" in shown
    page = (tmp_path / "report.html").read_text()
    for words in ("disaggregation always", "cache_blocks 25000", f"faults {faults}", "<th>steps</th>"):
        assert words in page
    assert re.search(
        r"^fetched      planned: 0 prefixes .*, [1-9]\d* prompts from prefill replicas;", shown, re.MULTILINE
    )


def test_lines_are_not_wrapped_where_no_terminal_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert not run(monkeypatch, "--trace", "chat", "--limit", "20", "--replicas", "2")
    lines = capsys.readouterr().out.splitlines()
    assert all(line[:1].strip() for line in lines) and max(map(len, lines)) > 80
    model = latency_model("h200-8b")
    assert f"model        {model.name}: {model.source}" in lines


def test_progress_is_plain_lines_where_no_terminal_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "LINE_SECONDS", 0.0)
    assert not run(monkeypatch, "--trace", "chat", "--limit", "40", "--replicas", "2", "--load", "0.5")
    shown = capsys.readouterr().err
    assert re.search(r"^simulating: \d+ of 40 requests, [1-9]\d* s of virtual time$", shown, re.MULTILINE)
    assert re.search(r"^measuring what round-robin can serve: 40 of 40 requests, ", shown, re.MULTILINE)


def test_ctrl_c_names_how_far_it_came(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupted(self: Simulation, progress: Any) -> None:
        self.ended = 7
        progress(7)
        raise KeyboardInterrupt

    monkeypatch.setattr(Simulation, "run", interrupted)
    options = ("--trace", "chat", "--limit", "20", "--replicas", "2")
    assert run(monkeypatch, *options, "--out", str(tmp_path)) == 130
    assert "stopped after 7 of 20 requests; nothing was written" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert run(monkeypatch, *options, "--load", "1") == 130
    assert "stopped after 7 of 20 requests of measuring" in capsys.readouterr().err


def test_the_result_is_kept_when_drawing_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ("--trace", "chat", "--limit", "5", "--out", str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "matplotlib.figure", None)
        assert run(patched, *options) == 1
    assert "--out draws with matplotlib" in capsys.readouterr().err and not list(tmp_path.iterdir())

    def fails(simulation: Simulation, result: Result) -> bytes:
        raise SimulationError("cannot be drawn")

    monkeypatch.setattr(output, "plot", fails)
    assert run(monkeypatch, *options) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs of the latency model .* is 0; it is a number of at least 1"),
        ({"base": "x"}, "base of the latency model .* is 'x'"),
        ({"base": -1}, "base of the latency model .* is -1; it is a number of at least 1e-09"),
        ({"per_kv_token": math.nan}, "per_kv_token of the latency model .* is nan"),
        ({"name": 3}, "name of the latency model .* is not a text"),
        ({"other": 1}, "is not an object with exactly these fields: name, source, base"),
        ({"max_num_seqs": 8}, ""),
    ],
)
def test_a_latency_file_is_checked(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(asdict(latency_model("h200-8b")) | change))
    if sentence:
        with pytest.raises(SimulationError, match=sentence):
            latency_model(str(path))
    else:
        assert latency_model(str(path)).max_num_seqs == 8


def test_rates_count_the_time_of_failed_requests(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All are lost early: what was served until then is no rate of the whole run."""
    options = ("--trace", "chat", "--limit", "40", "--replicas", "1", "--faults", "kill:m0-r0@10+1000", "--json")
    assert not run(monkeypatch, *options)
    result = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert result["failed"] > 10 and result["goodput"] <= result["arrivals_per_second"]
    assert not run(monkeypatch, *options, "--policy", "least-load")
    result = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert result["prediction_error"] == {"p50": None, "p90": None, "p99": None}
    assert not run(monkeypatch, *options[:-1], "--policy", "least-load")
    shown = capsys.readouterr().out
    assert "nan" not in shown and "prediction" not in shown
