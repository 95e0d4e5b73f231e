"""Benchmarks that need a dedicated machine must still start: those named here run with a tiny input.

`policies.py` and others start whole servers, and those of `gpu_bench/` need a GPU: they do not run here.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from answers import loops

from headrace_cluster.simulator.generated import generated
from headrace_cluster.simulator.latency_model import latency_model
from headrace_cluster.simulator.simulation import Setup, Simulation

FOLDER = Path(__file__).parents[1] / "benchmarks"


def test_the_host_step_benchmark_runs() -> None:
    command = [sys.executable, str(FOLDER / "host_step.py"), "--running", "2", "--steps", "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    parts = {line[:16].strip(): line[16:].split("/") for line in done.stdout.splitlines()}
    assert {"schedule", "prepare", "sample", "process", "load", "plan to ranks", "deliver", "step"} <= parts.keys()
    assert float(parts["step"][0]) > float(parts["process"][0]) > 0
    profiled = subprocess.run([*command, "--profile"], capture_output=True, text=True, timeout=120, check=False)
    assert profiled.returncode == 0 and "scheduler.py" in profiled.stdout


def test_the_router_scale_benchmark_runs() -> None:
    command = [sys.executable, str(FOLDER / "router_scale.py"), "--replicas", "2,40", "--rounds", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    head, *lines = (line.rsplit(maxsplit=2) for line in done.stdout.splitlines())
    assert head == ["ms", "2", "40"]
    found = {part: (float(few), float(many)) for part, few, many in lines}
    parts = {"load report", "frame of 8 tokens", "rebalance", "maintain", "decision 20", "card", "scrape", "stall"}
    assert parts <= found.keys() and all(many > 0 for _, many in found.values()), found


def test_the_relay_benchmark_runs() -> None:
    command = [sys.executable, str(FOLDER / "relay.py"), "--streams", "4", "--seconds", "0.5", "--rounds", "1"]
    paths = os.pathsep.join([str(FOLDER.parent / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    heads, (streams, floor, router) = (line.split() for line in done.stdout.splitlines())
    assert heads[-2:] == ["floor", "router"] and streams == "4" and float(floor) > 0 and float(router) > 0


def _simulated(name: str, *flags: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(FOLDER / name), *flags], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_placement_benchmark_runs() -> None:
    policies = ("predicted", "cache-aware")
    trace = ("--trace", "chat", "--limit", "12", "--replicas", "2")
    lines = _simulated("placement.py", *trace, "--load", "0.8", "--cache", "0,50", "--policies", ",".join(policies))
    rows = [line.split() for line in lines if line.startswith(policies)]
    assert [row[0] for row in rows] == [*policies, *policies]
    assert all(0 < float(row[2]) < 1 and 0 < float(row[3]) < 1 for row in rows), rows


def test_the_disaggregation_benchmark_runs() -> None:
    shape = ("--lengths", "512", "--loads", "0.5", "--replicas", "2", "--prefill", "1", "--output", "8")
    head, row = _simulated("disaggregation.py", *shape, "--requests", "6", "--seeds", "1")
    assert head.split()[:6] == ["tokens", "load", "colocated", "always", "auto", "shared"]
    assert row.split()[:2] == ["512", "0.50"] and row.count("(") == 4


def test_a_fitted_latency_model_can_be_simulated(tmp_path: Path) -> None:
    path = tmp_path / "fit.json"
    command = [sys.executable, str(FOLDER / "fit_latency.py"), "--out", str(path), "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    model = latency_model(str(path))
    assert model.base > 0 and model.per_prefill_token > 0 and model.kv_bytes == 46_080
    setup = Setup(model, replicas=2)
    simulation = Simulation(generated("chat", 10, 0).faster(0.05), setup)
    simulation.run()
    assert all(request.failure is None and (request.ttft or 0) > 0.05 for request in simulation.requests)


def _answers(*flags: str) -> tuple[dict[str, Any], dict[str, dict[str, int]]]:
    """(defaults, counts by question) of the embedded model."""
    command = [sys.executable, str(FOLDER / "answers.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr
    (defaults, *rows) = (
        (line[: line.index("{")].strip(), line[line.index("{") :]) for line in done.stdout.splitlines()
    )
    assert defaults[0] == "defaults"
    return json.loads(defaults[1]), {question: json.loads(row) for question, row in rows}


@pytest.mark.parametrize("seeds", [3])
def test_the_readmes_questions_have_short_correct_answers(seeds: int) -> None:
    defaults, found = _answers("--seeds", str(seeds), "--others", "0")
    text = (FOLDER.parent / "README.md").read_text()
    questions = set(re.findall(r'"role": "user", "content": "([^"]+)"', text)) | set(
        re.findall(r'--once "([^"]+)"', text)
    )
    assert questions == found.keys(), "benchmarks/answers.py uses the README's questions"
    for question, row in found.items():
        assert row["answers"] == row["right"] == row["stopped"] == seeds and row["loops"] == 0, (question, row)
        assert row["longest_tokens"] < 40 < defaults["max_tokens"]


def test_the_loop_detector() -> None:
    assert loops([1, 2, 3] * 4) and loops([9, 8, *[1, 2, 3] * 4, 7]) and loops([5] * 8)
    assert not loops([1, 2, 3] * 3) and not loops([1, 2, 3, *[4, 5, 6] * 3]) and not loops([5] * 7)
    assert not loops([1, 2] * 3 + [1, 3] * 3) and not loops(list(range(100))) and not loops([])


def test_the_limits_benchmark_runs_and_memory_is_bounded() -> None:
    """At most 16 MiB, and 4 times the accepted bytes."""
    bounds = {"trailers": 16, "grpc empty messages": 32, "text of commas": 32, "small objects": 20}
    command = [sys.executable, str(FOLDER / "limits.py"), "--rounds", "1", "--cases", ",".join(bounds)]
    environ = {**os.environ, "PYTHONPATH": str(FOLDER.parent / "tests")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    found = {line[: line.index("{")].strip(): json.loads(line[line.index("{") :]) for line in lines}
    assert found.keys() == bounds.keys()
    for name, row in found.items():
        assert row["MiB"] <= bounds[name] and row["lag"] > 0 and row["cpu"] > 0, (name, row)
