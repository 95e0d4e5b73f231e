"""Processor time of a router per streamed token, beside a bare relay of the same shape.

    PYTHONPATH=tests python benchmarks/relay.py [--streams 1,32,512] [--seconds 8] [--rounds 2] [--routers 1]
                                                [--sglang-router PATH] [--save]

A replica without a model sends one frame per step with a token for each stream. `floor` forwards these with grpc.aio
and asyncio, over the same TLS, as a constant event; `router` is Headrace's, with `--routers 2` two of them, each with
half of the streams; `sglang-router` is that program, in front of a worker that streams the same events over HTTP. All
in turns, in one run; figures are medians of the rounds, in microseconds of all threads of the process (or of both).
"""

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from urllib.request import ProxyHandler, build_opener

import machine

STEP_SECONDS = {1: 0.02, 32: 0.03, 512: 0.06}
BODY = {"model": "tiny", "prompt": "the quick brown fox", "stream": True, "max_tokens": 100_000, "temperature": 0}
START_SECONDS = 60.0


class Client(asyncio.Protocol):
    """One stream; all of them count their events together."""

    events = 0
    streaming = 0

    def __init__(self, port: int) -> None:
        body = json.dumps(BODY | {"ignore_eos": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
        self._request = head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body
        self._counts = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        events = data.count(b"data: ")
        Client.events += events
        if events and not self._counts:
            self._counts = True
            Client.streaming += 1


@contextmanager
def part(name: str, step_seconds: float, address: str = "-") -> "Iterator[tuple[int, int]]":
    """(process id, port) of a part."""
    command = [sys.executable, str(Path(__file__).with_name("relay_parts.py")), name, str(step_seconds), address]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.pid, int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


@contextmanager
def gateway(program: str, step_seconds: float) -> "Iterator[tuple[int, int]]":
    """sglang-router in front of a worker."""
    with part("worker", step_seconds) as (_, worker):
        port, metrics = _free_port(), _free_port()
        command = [program, "launch", "--worker-urls", f"http://127.0.0.1:{worker}", "--policy", "round_robin"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
        command += ["--log-level", "error"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _await_health(f"http://127.0.0.1:{port}/readiness")
            yield process.pid, port
        finally:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _await_health(url: str) -> None:
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            build_opener(ProxyHandler({})).open(url, timeout=1).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def processor_seconds(processes: list[int]) -> float:
    """Of all their threads."""
    tasks = [task for pid in processes for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


async def measure(found: list[tuple[int, int]], streams: int, seconds: float) -> float:
    """Microseconds per token."""
    loop = asyncio.get_running_loop()
    pids, ports = zip(*found, strict=True)
    Client.events = Client.streaming = 0
    transports = []
    for index in range(streams):
        port = ports[index % len(ports)]
        transports.append((await loop.create_connection(partial(Client, port), "127.0.0.1", port))[0])
    end = time.monotonic() + START_SECONDS
    while Client.streaming < streams:
        if time.monotonic() > end:
            raise SystemExit(f"Of {streams} streams {Client.streaming} began within {START_SECONDS:.0f} s.")
        await asyncio.sleep(0.1)
    await asyncio.sleep(1)
    began, used = Client.events, processor_seconds(list(pids))
    await asyncio.sleep(seconds)
    used = processor_seconds(list(pids)) - used
    tokens = Client.events - began
    for transport in transports:
        transport.abort()
    if not tokens:
        raise SystemExit("No token arrived while it was measured.")
    return used / tokens * 1e6


def contender(name: str, streams: int, options: argparse.Namespace) -> float:
    step_seconds = STEP_SECONDS.get(streams, 0.05)
    with ExitStack() as stack:
        if name == "sglang-router":
            found = [stack.enter_context(gateway(options.sglang_router, step_seconds))]
        else:
            _, port = stack.enter_context(part("replica", step_seconds))
            count = options.routers if name == "router" else 1
            found = [stack.enter_context(part(name, step_seconds, f"127.0.0.1:{port}")) for _ in range(count)]
        return asyncio.run(measure(found, streams, options.seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,32,512")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--routers", type=int, default=1)
    parser.add_argument("--sglang-router", help="its program")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    names = ["floor", "router", *(["sglang-router"] if options.sglang_router else [])]
    result: dict[str, dict[str, float]] = {}
    print(f"{'us per token':>16}" + "".join(f"{name:>16}" for name in names), flush=True)
    for streams in map(int, options.streams.split(",")):
        rounds = [{name: contender(name, streams, options) for name in names} for _ in range(options.rounds)]
        result[str(streams)] = {name: round(median(each[name] for each in rounds), 1) for name in names}
        print(f"{streams:>16}" + "".join(f"{result[str(streams)][name]:>16}" for name in names), flush=True)
    if options.save:
        print(machine.save("relay", {"us_per_token": result, "routers": options.routers}))


if __name__ == "__main__":
    main()
