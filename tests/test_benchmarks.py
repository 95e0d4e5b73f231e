"""Benchmarks that need a dedicated machine must still start: those named here run with a tiny input.

`policies.py` and others start whole servers, and those of `gpu_bench/` need a GPU: they do not run here.
"""

import subprocess
import sys
from pathlib import Path

from headrace_cluster.simulator.generated import generated
from headrace_cluster.simulator.latency_model import latency_model
from headrace_cluster.simulator.simulation import Setup, Simulation
from support.child_environment import child_environment

FOLDER = Path(__file__).parents[1] / "benchmarks"


def _lines(name: str, *flags: str, seconds: float = 120) -> list[str]:
    """What a benchmark prints."""
    command = [sys.executable, str(FOLDER / name), *flags]
    environment = child_environment()
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_host_step_benchmark_runs() -> None:
    flags = ("--running", "2", "--steps", "20")
    parts = {line[:16].strip(): line[16:].split("/") for line in _lines("host_step.py", *flags)}
    assert {"schedule", "prepare", "sample", "process", "load", "plan to ranks", "deliver", "step"} <= parts.keys()
    assert float(parts["step"][0]) > float(parts["process"][0]) > 0
    assert any("scheduler.py" in line for line in _lines("host_step.py", *flags, "--profile"))


def test_the_router_scale_benchmark_runs() -> None:
    flags = ("--replicas", "2,40", "--rounds", "3")
    head, *lines = (line.rsplit(maxsplit=2) for line in _lines("router_scale.py", *flags))
    assert head == ["ms", "2", "40"]
    found = {part: (float(few), float(many)) for part, few, many in lines}
    parts = {"load report", "frame of 8 tokens", "rebalance", "maintain", "decision 20", "card", "scrape", "stall"}
    assert parts <= found.keys() and all(many > 0 for _, many in found.values()), found


def test_the_relay_benchmark_runs() -> None:
    flags = ("--streams", "4", "--seconds", "0.5", "--rounds", "1")
    heads, (streams, floor, router) = (line.split() for line in _lines("relay.py", *flags))
    assert heads[-2:] == ["floor", "router"] and streams == "4" and float(floor) > 0 and float(router) > 0


def test_the_placement_benchmark_runs() -> None:
    policies = ("predicted", "cache-aware")
    trace = ("--trace", "chat", "--limit", "12", "--replicas", "2")
    lines = _lines("placement.py", *trace, "--load", "0.8", "--cache", "0,50", "--policies", ",".join(policies))
    rows = [line.split() for line in lines if line.startswith(policies)]
    assert [row[0] for row in rows] == [*policies, *policies]
    assert all(0 < float(row[2]) < 1 and 0 < float(row[3]) < 1 for row in rows), rows


def test_the_disaggregation_benchmark_runs() -> None:
    shape = ("--lengths", "512", "--loads", "0.5", "--replicas", "2", "--prefill", "1", "--output", "8")
    head, row = _lines("disaggregation.py", *shape, "--requests", "6", "--seeds", "1")
    assert head.split()[:6] == ["tokens", "load", "colocated", "always", "auto", "shared"]
    assert row.split()[:2] == ["512", "0.50"] and row.count("(") == 4


def test_a_fitted_latency_model_can_be_simulated(tmp_path: Path) -> None:
    path = tmp_path / "fit.json"
    _lines("fit_latency.py", "--out", str(path), "--rounds", "1", seconds=900)
    model = latency_model(str(path))
    assert model.base > 0 and model.per_prefill_token > 0 and model.kv_bytes == 46_080
    setup = Setup(model, replicas=2)
    simulation = Simulation(generated("chat", 10, 0).faster(0.05), setup)
    simulation.run()
    assert all(request.failure is None and (request.ttft or 0) > 0.05 for request in simulation.requests)
