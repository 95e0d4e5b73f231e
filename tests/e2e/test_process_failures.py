"""Two serves side by side, and killed processes. The tests depend on their order: `first` is stopped in the second
test, `second` is killed by kill -9."""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import pytest

from headrace_proto.inference_pb2 import GenerateOptions, GenerateRequest
from headrace_proto.inference_pb2_grpc import InferenceStub
from support.e2e.headrace_process import SMALL, Serve
from support.e2e.streams import Outcome, run_streams

BODY = {
    "model": "smollm2",
    "prompt": [504, 3575, 282, 4649, 314],
    "temperature": 0,
    "max_tokens": 8,
    "ignore_eos": True,
}
LEAN = (*SMALL, "--kv-cache-memory", "128MiB", "--cpu-threads", "1")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serve, Serve]]:
    """Two serves that start at the same time."""
    base = tmp_path_factory.mktemp("failures")
    started = (Serve(base / "first", *LEAN), Serve(base / "second", *LEAN))
    try:
        yield started[0].await_ready(), started[1].await_ready()
    finally:
        for serve in started:
            serve.close()


def _answer(serve: Serve) -> list[int]:
    answer = httpx.post(
        f"{serve.url}/v1/completions", json=BODY | {"return_token_ids": True}, timeout=60, trust_env=False
    )
    answer.raise_for_status()
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_stop_finishes_requests_and_leaves_nothing(pair: tuple[Serve, Serve], eventually: Callable[..., None]) -> None:
    first, second = pair
    ports = [socket.port for socket in first.listening()]
    outcomes: list[Outcome] = []
    body = BODY | {"max_tokens": 24}
    running = threading.Thread(target=lambda: outcomes.extend(run_streams(first.url, [body])))
    running.start()
    metrics = f"{first.url}/metrics"
    eventually(
        lambda: "headrace_requests_in_flight 1.0" in httpx.get(metrics, trust_env=False).text, 20, "that it runs"
    )
    done = first.run("stop", "--admin-port", str(first.admin_port))  # SIGTERM, and a wait for the end
    assert (done.returncode, done.stdout, first.process.wait(1)) == (0, "", 0), done.stderr
    eventually(lambda: not first.remaining(), 5, "that nothing of it runs")
    eventually(lambda: not [port for port in ports if _listens(port)], 5, "that its ports are free")
    running.join(10)
    assert outcomes and outcomes[0].complete and len(outcomes[0].token_ids) == 24
    assert first.stderr_text.rstrip().endswith(" stopped")
    for noise in ("Traceback", "*** SIGTERM", "was killed"):
        assert noise not in first.stderr_text
    files = [path.name for path in first.home.iterdir() if path.name not in ("logs", "cache", "ranks")]
    assert files == [], "keys and tokens are removed (`ranks`: the stages of ended ranks, which the next one removes)"
    assert len(_answer(second)) == 8, "the other serve still runs"


def test_a_killed_rank_is_replaced(pair: tuple[Serve, Serve], eventually: Callable[..., None]) -> None:
    second = pair[1]
    expected = _answer(second)
    (replica,) = second.status()["replicas"]
    outcomes: list[Outcome] = []
    running = threading.Thread(target=lambda: outcomes.extend(run_streams(second.url, [BODY | {"max_tokens": 500}])))
    running.start()
    eventually(lambda: "headrace_requests_in_flight 1.0" in httpx.get(f"{second.url}/metrics").text, 20)
    os.kill(replica["ranks"][0]["pid"], signal.SIGKILL)
    eventually(lambda: httpx.get(f"{second.url}/health/ready").status_code == 503, 3, "that it is not ready")
    assert httpx.get(f"{second.url}/health/live").status_code == 200
    eventually(lambda: httpx.get(f"{second.url}/health/ready").status_code == 200, 60, "that it is ready again")
    (rebuilt,) = second.status()["replicas"]
    assert (rebuilt["generation"], rebuilt["state"]) == (replica["generation"] + 1, "ready")
    assert _answer(second) == expected
    running.join(90)
    (outcome,) = outcomes
    assert outcome.complete or outcome.error, "a request that loses its replica ends with an answer or an error"
    events = second.stderr_text.partition("Talk to it")[2]
    assert f"(process {replica['ranks'][0]['pid']}) was killed; its log: {second.home}/logs/" in events
    assert "Traceback" not in events and "{" not in events


def test_a_killed_router_is_restarted(pair: tuple[Serve, Serve], eventually: Callable[..., None]) -> None:
    second = pair[1]
    (router,) = second.status()["routers"]
    os.kill(router["pid"], signal.SIGKILL)
    eventually(lambda: [r["pid"] for r in second.status()["routers"]] not in ([], [router["pid"]]), 30, "a new router")
    (again,) = second.status()["routers"]
    eventually(lambda: httpx.get(f"http://{again['http']}/health/ready").status_code == 200, 20)
    assert again["http"] == router["http"], "it has the same address"
    assert len(_answer(second)) == 8


def test_a_killed_gcs_is_started_again(pair: tuple[Serve, Serve], eventually: Callable[..., None]) -> None:
    """Requests in flight do not notice it, and what is lost meanwhile is built again afterwards."""
    second = pair[1]
    expected = _answer(second)
    (replica,) = second.status()["replicas"]
    second.record_processes()
    (gcs,) = [entry for entry in second.processes.values() if entry.is_running() and entry.name() == "gcs_server"]
    outcomes: list[Outcome] = []
    running = threading.Thread(target=lambda: outcomes.extend(run_streams(second.url, [BODY | {"max_tokens": 200}])))
    running.start()
    eventually(lambda: "headrace_requests_in_flight 1.0" in httpx.get(f"{second.url}/metrics").text, 20)
    gcs.kill()
    eventually(lambda: "another one was started" in second.stderr_text, 5, "a message")
    running.join(60)
    assert outcomes and outcomes[0].complete and len(outcomes[0].token_ids) == 200
    (same,) = second.status()["replicas"]
    assert (same["generation"], same["state"]) == (replica["generation"], "ready")
    os.kill(replica["ranks"][0]["pid"], signal.SIGKILL)
    eventually(lambda: httpx.get(f"{second.url}/health/ready").status_code == 503, 3, "that it is not ready")
    eventually(lambda: httpx.get(f"{second.url}/health/ready").status_code == 200, 30, "that it is ready again")
    assert _answer(second) == expected


def test_kill_9_leaves_nothing(pair: tuple[Serve, Serve], eventually: Callable[..., None]) -> None:
    second = pair[1]
    ports = [socket.port for socket in second.listening()]
    second.process.kill()
    second.process.wait()
    eventually(lambda: not second.remaining(), 10, "that nothing of it runs")
    eventually(lambda: not [port for port in ports if _listens(port)], 5, "that its ports are free")
    eventually(lambda: not list(second.home.glob("*-*")), 2, "that its keys are removed")
    (run,) = (second.home / "logs").iterdir()
    assert {path.name for path in run.iterdir()} >= {"serve.log", "controller.log", "router.log", "smollm2-0-rank0.log"}
    eventually(lambda: (run / "ray" / "raylet.out").is_file() and not (run / "ray").is_symlink(), 5, "Ray's logs")
    assert [path for path in [run, *run.rglob("*")] if path.stat().st_mode & 0o077] == []
    text = (run / "smollm2-0-rank0.log").read_text()
    assert "generation=1" in text and "generation=2" in text, "a replaced replica appends to its file"
    done = second.run("logs", "smollm2-0", "--lines", "1")
    assert (done.returncode, done.stderr, len(done.stdout.splitlines())) == (0, "", 1)
    assert second.run("logs", "--path").stdout == f"{run}\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_a_start(
    start: Callable[..., Serve], eventually: Callable[..., None], number: signal.Signals
) -> None:
    """Of the terminal or the shell, to the whole process group."""
    serve = start(*LEAN)
    eventually(lambda: "Ray: up" in serve.stderr_text, 60, "that Ray is up")
    serve.record_processes()
    os.killpg(serve.process.pid, number)
    assert serve.process.wait(30) == 128 + number
    eventually(lambda: not serve.remaining(), 5, "that nothing of it runs")
    assert "Traceback" not in serve.stderr_text


def test_a_lost_raylet_ends_the_server_with_a_sentence(
    start: Callable[..., Serve], eventually: Callable[..., None]
) -> None:
    """Every replica ends with it, and a call of Ray would wait for a minute. No connection of a client is cut."""
    serve = start(*LEAN).await_ready()
    (found,) = [entry for entry in serve.processes.values() if entry.name() == "raylet"]
    long = BODY | {"max_tokens": 1500}
    request = GenerateRequest(model="smollm2", prompt="x", options=GenerateOptions(max_tokens=1500, ignore_eos=True))

    def whole() -> tuple[int, str]:
        answer = httpx.post(f"{serve.url}/v1/completions", json=long, timeout=60, trust_env=False)
        return answer.status_code, answer.json()["error"]["code"]

    def call() -> grpc.StatusCode:
        with grpc.insecure_channel(serve.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
            list(InferenceStub(channel).Generate(request))
        code: grpc.StatusCode = caught.value.code()
        return code

    with ThreadPoolExecutor() as pool:
        streamed = pool.submit(run_streams, serve.url, [long] * 2)
        answered, called = pool.submit(whole), pool.submit(call)
        metrics = f"{serve.url}/metrics"
        eventually(lambda: "headrace_requests_in_flight 4.0" in httpx.get(metrics, trust_env=False).text, 20)
        found.kill()
        assert serve.process.wait(15) == 1
        errors = {outcome.error for outcome in streamed.result(5)}
        assert errors == {"The server is shutting down; send the request again."}
        assert answered.result(5) == (503, "shutting_down")
        assert called.result(5) is grpc.StatusCode.UNAVAILABLE
    assert "Ray's raylet ended" in serve.stderr_text and "logs: " in serve.stderr_text
    eventually(lambda: not serve.remaining(), 10, "that no process remains")
