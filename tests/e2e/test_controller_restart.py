"""The controller is killed and restarted while requests are served. Each test ends with two ready replicas."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from support.e2e.headrace_process import TWO_SMALL, Serve
from support.e2e.metrics_page import Metrics
from support.e2e.plain_model import same_but_for_ties
from support.e2e.streams import Outcome, run_streams, steady_streams

FIRST, SECOND = "smollm2-0", "smollm2-1"
TOKENS = 120
PROMPTS = [[504, 3575, 282, 4649, 314], [504, 808, 314], [1780, 357, 253, 655], [378, 2038, 506]]
BODIES = [
    {
        "model": "smollm2",
        "prompt": [*PROMPTS[index % 4], 100 + index],
        "temperature": 0,
        "max_tokens": TOKENS,
        "ignore_eos": True,
    }
    for index in range(8)
]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Two replicas, one router."""
    made = Serve(tmp_path_factory.mktemp("restart") / "home", *TWO_SMALL)
    try:
        yield made.await_ready()
    finally:
        made.close()


@pytest.fixture(scope="module")
def undisturbed(serve: Serve) -> list[list[int]]:
    """The tokens of the requests without a kill."""
    outcomes = run_streams(serve.url, BODIES)
    assert not [outcome for outcome in outcomes if not outcome.complete]
    return [outcome.token_ids for outcome in outcomes]


def _controller(serve: Serve) -> int:
    status = serve.status()
    return int(status["controller"]["pid"]) if status is not None else 0


def _replicas(serve: Serve) -> dict[str, tuple[str, int, int]]:
    """State, generation and process of each; nothing while there is no controller."""
    status = serve.status()
    return {
        replica["id"]: (replica["state"], replica["generation"], replica["ranks"][0]["pid"] if replica["ranks"] else 0)
        for replica in (status["replicas"] if status is not None else [])
    }


def _routers(serve: Serve) -> list[dict[str, object]]:
    """Who they are, without what they have counted."""
    return [{name: router[name] for name in ("id", "pid", "http", "grpc")} for router in serve.status()["routers"]]


def _ready(serve: Serve, replica_id: str, generation: int) -> bool:
    return _replicas(serve).get(replica_id, ())[:2] == ("ready", generation)


def _running(serve: Serve, count: int) -> Callable[[], bool]:
    return lambda: Metrics(serve.url)["headrace_attempts_in_flight"] == count


def _streaming(serve: Serve) -> tuple[threading.Thread, list[Outcome]]:
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.extend(run_streams(serve.url, BODIES)))
    thread.start()
    return thread, outcomes


def test_streams_and_replicas_are_not_affected(
    serve: Serve, undisturbed: list[list[int]], eventually: Callable[..., None]
) -> None:
    before, routers = _replicas(serve), _routers(serve)
    controller = _controller(serve)
    running, outcomes = _streaming(serve)
    eventually(_running(serve, len(BODIES)), 20, "that all are running")
    os.kill(controller, signal.SIGKILL)
    killed = time.monotonic()
    late = httpx.post(f"{serve.url}/v1/completions", json=BODIES[0] | {"max_tokens": 4}, timeout=30)
    assert late.status_code == 200, "a request without a controller"
    running.join(120)
    assert [outcome.complete for outcome in outcomes] == [True] * len(BODIES)
    same_but_for_ties(BODIES, [outcome.token_ids for outcome in outcomes], undisturbed)
    eventually(lambda: _controller(serve) not in (0, controller), 30, "that another controller runs")
    print(f"another controller replied {time.monotonic() - killed:.1f} s after the kill")
    eventually(lambda: _replicas(serve) == before, 10, "that the same replicas are ready")
    eventually(lambda: _routers(serve) == routers, 10, "that the same router is connected")
    done = serve.run("status", "--json", "--admin-port", str(serve.admin_port))
    assert done.returncode == 0 and json.loads(done.stdout)["replicas"][0]["state"] == "ready"
    assert httpx.get(f"{serve.url}/health/ready").status_code == 200
    assert "the controller ended (killed by signal 9); starting another one now" in serve.stderr_text


def test_a_pause_and_eight_losses_in_two_minutes_end_nothing(
    serve: Serve, undisturbed: list[list[int]], eventually: Callable[..., None]
) -> None:
    before = _replicas(serve)
    with steady_streams(serve.url, BODIES[:2]) as outcomes:
        os.kill(_controller(serve), signal.SIGSTOP)
        time.sleep(45)  # `serve` replaces a controller that does not answer
        eventually(lambda: _replicas(serve) == before, 60, "that the same replicas are ready")
        killed, back = time.monotonic(), list[float]()
        for _ in range(8):
            controller, lost_at = _controller(serve), time.monotonic()
            os.kill(controller, signal.SIGKILL)
            eventually(lambda lost=controller: _controller(serve) not in (0, lost), 90, "that another controller runs")
            back.append(time.monotonic() - lost_at)
        print(f"eight losses in {time.monotonic() - killed:.0f} s; the next controller after {max(back):.1f} s at most")
        os.kill(serve.process.pid, signal.SIGSTOP)
        late = httpx.post(f"{serve.url}/v1/completions", json=BODIES[0] | {"max_tokens": 4}, timeout=60)
        assert late.status_code == 200, "a request without a supervisor"
        time.sleep(5)
        os.kill(serve.process.pid, signal.SIGCONT)
    failed = [outcome for _, outcome in outcomes if not outcome.complete]
    print(f"{len(failed)} of {len(outcomes)} streams failed")
    assert not failed and len(outcomes) > 20
    for index, outcome in outcomes:
        same_but_for_ties([BODIES[index]], [outcome.token_ids], [undisturbed[index]])
    eventually(lambda: _replicas(serve) == before, 30, "that the same replicas are ready")
    eventually(lambda: serve.status()["problems"] == [], 90, "that no problem is left")
    assert serve.process.poll() is None


def test_adopted_replicas_are_watched(
    serve: Serve, undisturbed: list[list[int]], eventually: Callable[..., None]
) -> None:
    running, outcomes = _streaming(serve)
    eventually(_running(serve, len(BODIES)), 20, "that all are running")
    os.kill(_replicas(serve)[FIRST][2], signal.SIGKILL)
    eventually(lambda: not _ready(serve, FIRST, 1), 2, "that the loss is detected")
    eventually(lambda: _ready(serve, FIRST, 2), 120, "that it is rebuilt")
    running.join(120)
    assert not [outcome for outcome in outcomes if not outcome.complete]
    same_but_for_ties(BODIES, [outcome.token_ids for outcome in outcomes], undisturbed)
    assert _ready(serve, SECOND, 1)


def test_changes_of_operators_outlive_the_controller(serve: Serve, eventually: Callable[..., None]) -> None:
    admin = ("--admin-port", str(serve.admin_port))
    done = serve.run("drain", SECOND, *admin)
    assert done.returncode == 0, done.stderr
    assert serve.run("role", FIRST, "decode", *admin).returncode == 0
    pid = _replicas(serve)[FIRST][2]
    controller = _controller(serve)  # at once: the role is newer than the last view of `serve`
    os.kill(controller, signal.SIGKILL)
    eventually(lambda: _controller(serve) not in (0, controller), 30, "that another controller runs")
    time.sleep(1)
    found = {replica["id"]: (replica["state"], replica["role"]) for replica in serve.status()["replicas"]}
    assert found == {FIRST: ("ready", "decode"), SECOND: ("drained", "both")}
    assert serve.run("undrain", SECOND, *admin).returncode == 0
    eventually(lambda: _ready(serve, SECOND, 2), 120, "that it is built again")
    assert _replicas(serve)[FIRST] == ("ready", 2, pid)


def test_stop_after_all_that(serve: Serve, eventually: Callable[..., None]) -> None:
    serve.record_processes()
    assert serve.run("stop", "--admin-port", str(serve.admin_port)).returncode == 0
    eventually(lambda: not serve.remaining(), 5, "that nothing of it runs")
    assert "Traceback" not in serve.stderr_text and serve.stderr_text.rstrip().endswith(" stopped")
