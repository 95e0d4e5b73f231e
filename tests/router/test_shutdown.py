"""Shutdown of a router: requests in flight get `shutdown_seconds`, then a proper error; no connection is cut."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import pytest

from headrace_proto.inference_pb2 import GenerateRequest
from headrace_proto.inference_pb2_grpc import InferenceStub
from headrace_router.config import END_REQUESTS
from support.members import secret_file

BODY = {"model": "tiny", "prompt": "x", "max_tokens": 200}
SENTENCE = "The server is shutting down; send the request again."


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as made:
        yield made


def _stop(harness: Any) -> "Future[Any]":
    return asyncio.run_coroutine_threadsafe(harness.router.stop(), harness.loop)


def _in_flight(harness: Any, eventually: Callable[..., None], count: int = 1) -> None:
    eventually(lambda: harness.router.services.admission.running == count)


def _stream(harness: Any) -> tuple[list[dict[str, Any]], str]:
    """Events until the end, and the last line. Raises httpx.RemoteProtocolError when the body has no proper end."""
    events, last = [], ""
    with harness.client() as client, client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: "):
                last = line
                if line != "data: [DONE]":
                    events.append(json.loads(line.removeprefix("data: ")))
    return events, last


def test_a_request_in_flight_finishes_while_new_ones_are_refused(
    harness: Any, make_replica: Any, eventually: Any, pool: ThreadPoolExecutor, expected_reply: str
) -> None:
    harness.start([make_replica(token_seconds=0.02)], shutdown_seconds=20.0)
    running = pool.submit(_stream, harness)
    _in_flight(harness, eventually)
    stopped = _stop(harness)
    with harness.client() as client:
        eventually(lambda: client.get("/health/ready").status_code == 503)
        refused = client.post("/v1/completions", json=BODY)
    assert (refused.status_code, refused.json()["error"]["message"]) == (503, SENTENCE)
    assert refused.headers["retry-after"] == "1"
    assert not stopped.done()
    events, last = running.result(15)
    assert last == "data: [DONE]"
    assert "".join(event["choices"][0]["text"] for event in events) == expected_reply
    stopped.result(5)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", harness.router.http_port)), "the port is closed"


def test_a_router_that_leaves_serves_first_and_closes_each_connection_after_its_answer(
    harness: Any, make_replica: Any, eventually: Any
) -> None:
    """Load balancers send requests for some seconds after it is not ready."""
    harness.start([make_replica()], leave_seconds=60.0)
    with harness.client() as client:
        assert client.get("/health/accepting").status_code == 200
        harness.loop.call_soon_threadsafe(harness.router.begin_stop)
        stopped = _stop(harness)
        eventually(lambda: client.get("/health/accepting").status_code == 503)
        served = client.post("/v1/completions", json=BODY)
        assert (served.status_code, served.headers["connection"]) == (200, "close")
        harness.loop.call_soon_threadsafe(harness.router.end_requests)  # the rest of the time is not waited for
    stopped.result(10)


def test_a_router_that_has_left_takes_no_connections_and_serves_those_that_are_open(
    harness: Any, make_replica: Any, eventually: Any, pool: ThreadPoolExecutor
) -> None:
    """While one stream is long, the next request of an idle connection is served, and gRPC's clients are told to go."""
    harness.start([make_replica(token_seconds=0.05)], leave_seconds=0.01, shutdown_seconds=60.0)
    running = pool.submit(_stream, harness)
    _in_flight(harness, eventually)
    with harness.client() as idle:
        idle.get("/health/live")
        stopped = _stop(harness)

        def closed() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", harness.router.http_port)) != 0

        eventually(closed)
        served = idle.post("/v1/completions", json=BODY | {"max_tokens": 1})
        assert (served.status_code, served.headers["connection"]) == (200, "close")
    assert running.result(15)[1] == "data: [DONE]"
    stopped.result(5)


def test_nothing_in_flight_ends_at_once(harness: Any, make_replica: Any) -> None:
    harness.start([make_replica()], shutdown_seconds=60.0)
    with harness.client() as idle:  # a kept-alive connection does not delay it
        idle.get("/health/live")
        began = time.monotonic()
        _stop(harness).result(20)
    assert time.monotonic() - began < 5


def test_requests_that_exceed_their_time_end_with_an_error_event_and_a_proper_body(
    harness: Any, make_replica: Any, eventually: Any, pool: ThreadPoolExecutor, capfd: pytest.CaptureFixture[str]
) -> None:
    replica = make_replica(token_seconds=0.5)
    harness.start([replica], shutdown_seconds=0.7)
    streamed = pool.submit(_stream, harness)
    _in_flight(harness, eventually)
    eventually(lambda: bool(replica.submits))
    time.sleep(0.2)  # a first token
    whole = pool.submit(lambda: harness.client().post("/v1/completions", json=BODY))
    _in_flight(harness, eventually, 2)
    _stop(harness).result(10)
    events, last = streamed.result(5)
    assert events[-1] == {
        "error": {"message": SENTENCE, "type": "overloaded_error", "param": None, "code": "shutting_down"}
    }
    assert "choices" in events[0] and "[DONE]" not in last
    answer = whole.result(5)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    assert answer.headers["retry-after"] == "1"
    shown = "".join(capfd.readouterr())
    assert "Traceback" not in shown and "Exception" not in shown


def test_grpc_ends_with_unavailable(harness: Any, make_replica: Any, eventually: Any, pool: ThreadPoolExecutor) -> None:
    harness.start([make_replica(token_seconds=0.5)], shutdown_seconds=1.0)

    def ask() -> tuple[grpc.StatusCode, str | None]:
        async def call() -> None:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{harness.router.grpc_port}") as channel:
                async for _ in InferenceStub(channel).Generate(GenerateRequest(model="tiny", prompt="x")):
                    pass

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            harness.call(call())
        return caught.value.code(), caught.value.details()

    running = pool.submit(ask)
    _in_flight(harness, eventually)
    stopped = _stop(harness)
    time.sleep(0.2)
    expected = (grpc.StatusCode.UNAVAILABLE, SENTENCE)
    assert ask() == expected, "a new call"
    assert not stopped.done()
    assert running.result(5) == expected, "the one that ran"
    stopped.result(5)


CHILD = """
import sys
from headrace_router.config import RouterConfig, StaticMember
from headrace_router.main import run
member = StaticMember(address=sys.argv[1], replica_id="r0")
config = dict(port=int(sys.argv[2]), grpc_port=None, members=(member,), shutdown_seconds=30)
sys.exit(run(RouterConfig(**config, secret_file=sys.argv[3])))
"""


@pytest.fixture
def child(harness: Any, make_replica: Any, eventually: Any) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """A router process that is ready, and its URL; its replica takes half a second per token."""
    replica = make_replica(token_seconds=0.5)
    harness.call(replica.start())
    harness.replicas = [replica]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, replica.address, str(port), str(secret_file())], stderr=subprocess.PIPE
    )
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        try:
            return httpx.get(f"{url}/health/ready", trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    try:
        eventually(ready, 30)
        yield url, process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def stream_end(child: tuple[str, "subprocess.Popen[bytes]"], eventually: Any) -> Iterator[Callable[[], Any]]:
    """Of a stream that has begun: waits for its end, and returns its last event."""
    url, lines = f"{child[0]}/v1/completions", list[str]()

    def read() -> None:
        with httpx.stream("POST", url, json=BODY | {"stream": True}, trust_env=False) as answer:
            lines.extend(line for line in answer.iter_lines() if line)

    running = threading.Thread(target=read)
    running.start()
    eventually(lambda: bool(lines), 10)

    def last() -> Any:
        running.join(5)
        return json.loads(lines[-1].removeprefix("data: "))

    yield last


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGHUP])
def test_signals_of_the_process(
    child: tuple[str, "subprocess.Popen[bytes]"],
    stream_end: Callable[[], Any],
    eventually: Any,
    first: signal.Signals,
) -> None:
    """The first may be repeated, as by a service manager that signals every process; SIGINT then ends it at once."""
    url, process = child
    for _ in range(2):
        process.send_signal(first)
        eventually(lambda: httpx.get(f"{url}/health/ready", trust_env=False).status_code == 503)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, shown = process.communicate(timeout=10)
    assert process.returncode == 0 and b"Traceback" not in shown, shown
    assert stream_end()["error"]["code"] == "shutting_down"


def test_requests_end_at_once_whichever_signal_arrives_first(
    child: tuple[str, "subprocess.Popen[bytes]"], stream_end: Callable[[], Any]
) -> None:
    """As `serve` ends its routers without Ray: signals that wait for a busy process have no order among its threads."""
    process = child[1]
    for number in (signal.SIGSTOP, signal.SIGTERM, END_REQUESTS, signal.SIGCONT):
        process.send_signal(number)
    _, shown = process.communicate(timeout=10)
    assert process.returncode == 0 and b"Traceback" not in shown, shown
    assert stream_end()["error"]["code"] == "shutting_down"
