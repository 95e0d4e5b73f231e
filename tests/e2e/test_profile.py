"""`headrace serve --profile DIR` and `headrace profile`: every rank of a replica writes a trace of its steps."""

import gzip
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.e2e.headrace_process import SMALL, Serve
from support.e2e.streams import Outcome, run_streams

LONG = {"model": "smollm2", "prompt": [504, 3575, 282, 4649], "temperature": 0, "max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Two ranks, whose folder does not exist yet."""
    base = tmp_path_factory.mktemp("profile")
    serve = Serve(base / "home", *SMALL, "--tp", "2", "--profile", str(base / "traces"))
    try:
        yield serve.await_ready()
    finally:
        serve.close()


@contextmanager
def _streaming(serve: Serve) -> Iterator[None]:
    outcomes: list[Outcome] = []
    running = threading.Thread(target=lambda: outcomes.extend(run_streams(serve.url, [LONG])))
    running.start()
    yield
    running.join(90)
    assert outcomes and outcomes[0].complete and len(outcomes[0].token_ids) == 400


def _folder(serve: Serve) -> Path:
    return serve.home.parent / "traces"


def _spans(path: Path) -> list[dict[str, Any]]:
    trace = json.loads(gzip.decompress(path.read_bytes()))
    return [event for event in trace["traceEvents"] if event.get("ph") == "X"]


def _profile(serve: Serve, *arguments: str) -> Any:
    return serve.run("profile", *arguments, "--admin-port", str(serve.admin_port))


def test_every_rank_writes_a_trace(profiled: Serve) -> None:
    with _streaming(profiled):
        done = _profile(profiled, "--steps", "5", "--seconds", "30")
        again = _profile(profiled, "smollm2-0", "--steps", "2")
    assert done.returncode == again.returncode == 0, done.stderr + again.stderr
    traces = sorted(_folder(profiled).iterdir())
    assert [path.name.partition("-g1-")[2][:3] for path in traces] == ["r0-", "r0-", "r1-", "r1-"]
    assert all(str(path) in done.stdout + again.stdout for path in traces)
    for path in (traces[0], traces[2]):
        spans = _spans(path)
        assert sum(span["name"].startswith("step ") for span in spans) == 5
        assert sum(span["name"].startswith("aten::") for span in spans) > 100
    assert "operator of rank 0" in done.stdout and "aten::" in done.stdout and "%" in done.stdout


def test_a_signal_starts_a_profile_on_one_rank(profiled: Serve, eventually: Callable[..., None]) -> None:
    before = set(_folder(profiled).iterdir())
    document = json.loads(profiled.run("status", "--json", "--admin-port", str(profiled.admin_port)).stdout)
    pid = document["replicas"][0]["ranks"][1]["pid"]
    with _streaming(profiled):
        os.kill(pid, signal.SIGUSR2)
        eventually(lambda: [p for p in _folder(profiled).iterdir() if p.suffix == ".gz" and p not in before], 30)
    (new,) = set(_folder(profiled).iterdir()) - before
    assert "-r1-" in new.name
    assert sum(span["name"].startswith("step ") for span in _spans(new)) == 20
    document = json.loads(profiled.run("status", "--json", "--admin-port", str(profiled.admin_port)).stdout)
    assert document["replicas"][0]["generation"] == 1, "no rank died"


def test_without_a_folder_it_is_rejected(server: Serve) -> None:
    done = _profile(server)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("headrace: ") and "--profile DIR" in line
