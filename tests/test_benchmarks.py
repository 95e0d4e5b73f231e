"""Benchmarks that need a dedicated machine must still start: each runs here with a tiny input."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from answers import loops

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
    """docs/reliability.md R18: at most 16 MiB, and 4 times the accepted bytes."""
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
