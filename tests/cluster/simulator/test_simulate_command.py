"""`headrace simulate` as its user runs it."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from headrace_cluster.cli import main
from headrace_cluster.simulator.errors import SimulationError
from headrace_cluster.simulator.latency_model import latency_model

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """run(arguments...): the exit status, and what was printed to standard output and standard error."""

    def simulate(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["headrace", "simulate", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return int(str(ended.value.code or 0)), printed.out, printed.err

    return simulate


def test_results_are_shown_and_written(run: Run, tmp_path: Path) -> None:
    faults = "kill:m0-r1@60+20,slow:m1-r0@3+6x4,add:m0-r0@90"
    options = [
        "--trace", "CHAT", "--limit", "20", "--replicas", "1", "--prefill", "1", "--decode", "2", "--models", "2",
        "--spread", "0.1", "--seed", "3", "--routers", "2", "--block-size", "32", "--disaggregation", "always",
        "--speed", "2", "--faults", faults, "--out", str(tmp_path / "out"),
    ]  # fmt: skip
    status, shown, _ = run(*options)
    assert status == 0
    for word in ("hit rate", "TTFT", "TPOT", "goodput", "imbalance", "decision", "h200-8b: by arithmetic"):
        assert word in shown
    assert "cache        25000 blocks of 32 tokens per replica" in shown
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    expected = {
        "policy": "predicted", "replicas": 1, "prefill": 1, "decode": 2, "disaggregation": "always", "routers": 2,
        "models": 2, "spread": 0.1, "cache_blocks": 25_000, "block_size": 32, "faults": faults, "seed": 3, "limit": 20,
        "speed": 2.0, "load": None,
    }  # fmt: skip
    assert expected.items() <= result["setup"].items()
    assert result["setup"]["latency"] == asdict(latency_model("h200-8b"))
    assert result["requests"] == 20 and result["goodput"] > 0
    assert result["hit_rate"] <= result["hit_rate_bound"], "the caches are so large that nothing is dropped"
    for name in ("ttft_seconds", "tpot_seconds", "decision_ms"):
        assert result[name]["p50"] <= result[name]["p90"] <= result[name]["p99"]
    assert (tmp_path / "out" / "plot.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "data:image/png;base64," in page and "http" not in page.replace("http-equiv", "")
    assert f"faults {faults}" in page


def _azure(folder: Path) -> str:
    path = folder / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,480,10\n")
    return str(path)


def test_a_trace_without_hashes_has_no_hit_rate(run: Run, tmp_path: Path) -> None:
    assert "the trace has no hashes" in run("--trace", _azure(tmp_path), "--replicas", "1")[1]


def test_a_load_is_a_share_of_what_round_robin_serves(run: Run) -> None:
    options = ("--trace", "chat", "--limit", "60", "--replicas", "2", "--json", "--load")
    half, full = (json.loads(run(*options, load)[1])["arrivals_per_second"] for load in ("0.5", "1.0"))
    assert full == pytest.approx(2 * half)


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (["--trace", "nothing"], 2, "There is no trace 'nothing'"),
        (["--policy", "best"], 2, "There is no policy 'best'"),
        (["--policy", "power_of_two"], 2, "Predicted, the default, knows the KV caches and the load"),
        (["--latency", "b200"], 2, "There is no latency model 'b200'"),
        (["--faults", "kill:m0-r9@1+2"], 2, "no replica m0-r9 for a fault; there are m0-r0, m0-r1,"),
        (["--faults", "slow:m0-r1@1+2x0"], 2, "the factor is above 0"),
        (["--speed", "nan"], 2, "--speed is above 0"),
        (["--load", "0"], 2, "--load is a share above 0"),
        (["--spread", "-1"], 2, "The spread is -1"),
        (["--slo-ttft", "-1"], 2, "are seconds above 0"),
        (["--prefill", "2"], 2, "at least one replica"),
        ([], 1, "cannot be read"),
        (["--trace", "chat", "--limit", "5", "--out", "/dev/null/out"], 1, "cannot be written"),
        (["--trace", "chat", "--limit", "5", "--cache-blocks", "1"], 1, "pass --cache-blocks"),
    ],
)
def test_errors_are_sentences(run: Run, arguments: list[str], status: int, sentence: str) -> None:
    """Wrong options are found before the trace is read."""
    trace = [] if "--trace" in arguments else ["--trace", "missing.jsonl"]
    code, _, err = run(*trace, *arguments)
    assert code == status and sentence in " ".join(err.split())


def test_the_policy_session_needs_sessions(run: Run, tmp_path: Path) -> None:
    status, _, err = run("--trace", _azure(tmp_path), "--policy", "Session")
    assert status == 2 and "have no sessions" in err
    _, out, _ = run("--trace", "chat", "--limit", "20", "--policy", "Session", "--json")
    assert json.loads(out)["policy"] == "session"


def test_a_latency_file_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    fields = asdict(latency_model("h200-8b"))
    path.write_text(json.dumps(fields | {"max_num_seqs": 8}))
    assert latency_model(str(path)) == replace(latency_model("h200-8b"), max_num_seqs=8)
    for wrong in ({"max_num_seqs": 0}, {"base": "x"}, {"base": -1}, {"per_kv_token": math.nan}, {"other": 1}):
        path.write_text(json.dumps(fields | wrong))
        with pytest.raises(SimulationError, match=f"cannot be used; {next(iter(wrong))}: "):
            latency_model(str(path))
    with pytest.raises(SimulationError, match="cannot be read"):
        latency_model("missing.json")


def test_rates_count_the_time_of_failed_requests(run: Run) -> None:
    """All are lost early: what was served until then is no rate of the whole run."""
    options = ("--trace", "chat", "--limit", "40", "--replicas", "1", "--faults", "kill:m0-r0@10+1000", "--json")
    result = json.loads(run(*options)[1], parse_constant=pytest.fail)
    assert result["failed"] > 10 and result["goodput"] <= result["arrivals_per_second"]
    result = json.loads(run(*options, "--policy", "least-load")[1], parse_constant=pytest.fail)
    assert result["prediction_error"] == {"p50": None, "p90": None, "p99": None}
