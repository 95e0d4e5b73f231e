"""The control plane is stopped for minutes under load; takes 7 minutes."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.e2e.headrace_process import TWO_SMALL, Serve
from support.integration.arrivals import Arrivals

PAUSE_SECONDS = 240.0  # beyond every limit of the control plane, and within the limit of a test
GCS_SECONDS = 120.0
BACK_SECONDS = 30.0
RATE, TOKENS = 1.0, 32


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Two replicas, one router."""
    made = Serve(tmp_path_factory.mktemp("pauses") / "home", *TWO_SMALL)
    try:
        yield made.await_ready()
    finally:
        made.close()


def _replicas(serve: Serve) -> list[tuple[str, str, int, int]]:
    """Id, state, generation and process of each; nothing while there is no controller."""
    status = serve.status()
    return [
        (replica["id"], replica["state"], replica["generation"], replica["ranks"][0]["pid"])
        for replica in (status["replicas"] if status is not None else [])
        if replica["ranks"]
    ]


def _stopped(serve: Serve, which: str) -> list[int]:
    """The processes that are stopped. That of `serve` and its controller together: it would start another one."""
    if which == "serve and controller":
        return [serve.process.pid, int(serve.status()["controller"]["pid"])]
    serve.record_processes()
    return [pid for pid, process in serve.processes.items() if process.is_running() and process.name() == "gcs_server"]


@pytest.mark.parametrize(
    ("which", "seconds"), [("serve and controller", PAUSE_SECONDS), ("Ray's GCS", GCS_SECONDS)], ids=["control", "gcs"]
)
def test_nothing_fails_and_nothing_is_stopped(
    serve: Serve, which: str, seconds: float, eventually: Callable[..., Any]
) -> None:
    before = _replicas(serve)
    assert [state for _, state, _, _ in before] == ["ready", "ready"]
    pids = _stopped(serve, which)
    assert pids
    arrivals = Arrivals(serve.url, RATE, TOKENS, model="smollm2")
    time.sleep(5)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    back = time.monotonic()
    eventually(lambda: _replicas(serve) == before, BACK_SECONDS, "that the same replicas are ready")
    print(f"{which}: control is back {time.monotonic() - back:.1f} s after {seconds:.0f} s")
    time.sleep(20)  # a replica that is taken for dead would be stopped now
    answers = arrivals.stop()
    assert _replicas(serve) == before
    assert len(answers) > 0.5 * RATE * seconds
    assert [answer for answer in answers if answer.status != 200] == []
