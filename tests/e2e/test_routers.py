"""Two routers on one port. Each test ends with a healthy serve."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from support.e2e.headrace_process import SMALL, Serve
from support.e2e.metrics_page import Metrics
from support.e2e.pinned_stream import PinnedStream, streams_at

EACH = 8
TOKENS = 96
CLIENT = httpx.Client(trust_env=False)  # making one takes 40 ms
PROMPTS = [[504, 3575, 282, 4649, 314], [504, 808, 314], [1780, 357, 253, 655], [378, 2038, 506]]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """One replica, two routers."""
    made = Serve(tmp_path_factory.mktemp("routers") / "home", *SMALL, "--routers", "2", "--shutdown-seconds", "30")
    try:
        yield made.await_ready()
    finally:
        made.close()


def _body(index: int) -> dict[str, Any]:
    prompt = [*PROMPTS[index % len(PROMPTS)], 100 + index]
    return {"model": "smollm2", "prompt": prompt, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}


def _running(serve: Serve) -> int:
    load = serve.status()["replicas"][0]["load"]
    return int(load["running"] + load["waiting"])


def _run(streams: list[PinnedStream]) -> None:
    for index, stream in enumerate(streams):
        stream.body = _body(index)
        stream.start()


def test_each_router_has_its_own_metrics_address(serve: Serve) -> None:
    routers = serve.status()["routers"]
    assert len(routers) == 2 and len({router["pid"] for router in routers}) == 2
    assert len({router["http"] for router in routers}) == len({router["grpc"] for router in routers}) == 1
    own = {router["metrics"] for router in routers}
    assert len(own | {routers[0]["http"]}) == 3
    table = serve.run("status", "--admin-port", str(serve.admin_port)).stdout
    for router in routers:
        assert f"http://{router['metrics']}/metrics" in serve.stderr_text, "the banner lists it"
        assert f"(process {router['pid']}): HTTP {router['http']}" in table and router["metrics"] in table
        assert httpx.get(f"http://{router['metrics']}/health/ready", trust_env=False).status_code == 200
    for _ in range(16):
        assert httpx.post(f"{serve.url}/v1/completions", json=_body(0) | {"max_tokens": 1}).status_code == 200
    answered = [Metrics(f"http://{address}")["vllm:request_success_total"] for address in own]
    assert sum(answered) == 16 and min(answered) > 0


def test_streams_of_the_other_router_continue_after_a_kill(serve: Serve, eventually: Callable[..., None]) -> None:
    routers = serve.status()["routers"]
    victim, other = (router["pid"] for router in routers)
    # The text of the same requests without a kill.
    undisturbed = streams_at(serve.url, [victim, other], EACH)
    _run(undisturbed[other])
    for stream in undisturbed[other]:
        stream.join(60)
        assert stream.finished, stream.failure

    streams = streams_at(serve.url, [victim, other], EACH)
    _run(streams[other])
    _run(streams[victim])
    all_streams = streams[victim] + streams[other]
    eventually(lambda: all(stream.events > 2 for stream in all_streams), 30, "that all stream")
    eventually(lambda: _running(serve) == 2 * EACH, 5, "that the replica reports them")
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    eventually(lambda: _running(serve) <= EACH, 2, "that requests of the dead router are freed")
    freed = time.monotonic() - killed
    assert not any(stream.finished for stream in streams[other]), "too fast for this test: raise TOKENS"
    for stream in all_streams:
        stream.join(60)
    assert [stream.failure != "" and not stream.finished for stream in streams[victim]] == [True] * EACH
    assert [(stream.failure, stream.finished) for stream in streams[other]] == [("", True)] * EACH
    assert [stream.text for stream in streams[other]] == [stream.text for stream in undisturbed[other]]
    print(f"freed {freed:.2f} s after the kill")

    def back() -> bool:
        found = {router["metrics"]: router["pid"] for router in serve.status()["routers"]}
        return found.keys() == {router["metrics"] for router in routers} and victim not in found.values()

    eventually(back, 20, "that it runs again at its own address")
    assert "of 2 ended (killed by signal 9)" in serve.stderr_text
    pids = [router["pid"] for router in serve.status()["routers"]]
    again = streams_at(serve.url, pids, 1)
    assert other in again, "the other is the same process"
    for pid in pids:
        _run(again[pid])
        again[pid][0].join(60)
        assert again[pid][0].text == undisturbed[other][0].text
    eventually(lambda: _running(serve) == 0, 2, "that no request runs")
    eventually(lambda: Metrics(serve.url).busy == {}, 2, "that nothing is in use")


def test_no_request_fails_while_one_leaves(serve: Serve, eventually: Callable[..., None]) -> None:
    """Requests over fresh and over kept connections, and streams, while one of two routers is told to end."""
    pids = [router["pid"] for router in serve.status()["routers"]]
    streams = streams_at(serve.url, pids, 1)
    _run([stream for each in streams.values() for stream in each])
    over, answers, url = threading.Event(), list[int](), f"{serve.url}/v1/completions"

    def ask(kept: int) -> None:
        limits = httpx.Limits(max_keepalive_connections=kept)
        with httpx.Client(trust_env=False, limits=limits, timeout=60) as client:
            while not over.is_set():
                answers.append(client.post(url, json=_body(0) | {"max_tokens": 1}).status_code)

    with ThreadPoolExecutor(4) as clients:
        asking = [clients.submit(ask, kept) for kept in (0, 0, 1, 1)]
        eventually(lambda: len(answers) > 10, 60, "that requests are answered")
        os.kill(pids[0], signal.SIGTERM)
        eventually(lambda: not psutil.pid_exists(pids[0]), 60, "that the router has ended")
        count = len(answers)
        eventually(lambda: len(answers) > count + 20, 60, "that the other one, or its successor, answers")
        over.set()
    for each in asking:
        each.result()
    assert set(answers) == {200}
    for stream in (stream for each in streams.values() for stream in each):
        stream.join(60)
        assert (stream.failure, stream.finished) == ("", True)
    eventually(lambda: len(serve.status()["routers"]) == 2, 30, "that both run again")


def test_ctrl_c_stops_all_in_order(serve: Serve, eventually: Callable[..., None]) -> None:
    """Ctrl-C goes to the whole process group."""
    serve.record_processes()
    ports = {socket.port for socket in serve.listening()}
    os.killpg(serve.process.pid, signal.SIGINT)
    assert serve.process.wait(40) == 0
    eventually(lambda: not serve.remaining(), 5, "that nothing of it runs")
    assert len(ports) > 5 and serve.stderr_text.rstrip().endswith(" stopped")
    assert "Traceback" not in serve.stderr_text
