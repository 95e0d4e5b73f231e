"""Benchmarks that need a machine of their own still have to start: each is tried on something tiny."""

import json
import subprocess
import sys
from pathlib import Path

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


def test_the_gpu_benchmark_runs_small_on_a_cpu() -> None:
    command = [sys.executable, str(FOLDER / "gpu.py"), "--device", "cpu", "--models", "tiny", "--small"]
    done = subprocess.run(
        [*command, "--sections", "tokens,decode,workload,modes"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = {line.split()[0]: json.loads(line[line.index("{") :]) for line in done.stdout.splitlines()}
    assert found["tokens"]["wrong"] == 0 and found["tokens"]["positions"] == 192
    assert found["decode"]["batch 32"]["output_tok_s"] > 0
    assert found["workload"]["requests"] == 16
    assert all(way["alone_equals_together"] == way["of"] for way in found["modes"].values())
