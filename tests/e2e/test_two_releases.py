"""A router of the next release beside one of this release, with a controller and replicas of this one
(docs/reliability.md I20).
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from headrace_cluster.local.ports import free_port
from headrace_proto import CONTRACT_VERSION
from support.e2e.headrace_process import TWO_SMALL, Serve, environment
from support.e2e.metrics_page import Metrics
from support.e2e.plain_model import same_but_for_ties
from support.e2e.streams import Outcome, run_streams
from support.next_release import NextRelease

BODIES = [
    {
        "model": "smollm2",
        "prompt": [504, 808, 314, 100 + index],
        "temperature": 0,
        "max_tokens": 120,
        "ignore_eos": True,
    }
    for index in range(4)
]


@pytest.fixture
def control_port() -> int:
    """Of the controller."""
    return free_port("127.0.0.1")


@pytest.fixture
def serve(tmp_path: Path, control_port: int) -> Iterator[Serve]:
    """Two replicas, one router."""
    made = Serve(tmp_path / "home", *TWO_SMALL, "--control-port", str(control_port))
    try:
        yield made.await_ready()
    finally:
        made.close()


class _OtherRouter:
    """`headrace router` of the next release."""

    def __init__(self, serve: Serve, control_port: int, folder: Path) -> None:
        next_release = NextRelease(folder / "next")
        credentials, self._log = folder / "credentials", folder / "router.log"
        made = serve.run("credentials", str(credentials))
        assert made.returncode == 0, made.stderr
        variables = environment(serve.home) | next_release.environment
        version = "import headrace_proto; print(headrace_proto.CONTRACT_VERSION)"
        shown = subprocess.run(
            [sys.executable, "-c", version], env=variables, capture_output=True, text=True, check=True
        )
        assert int(shown.stdout) == CONTRACT_VERSION + 1
        command = (
            "router",
            "--controller",
            f"127.0.0.1:{control_port}",
            "--credentials",
            str(credentials),
            "--port",
            "0",
        )
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "headrace_cluster", *command, "--grpc-port", "0"],
                env=variables,
                stdin=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(20)


class _Streams:
    """Streamed completions in a thread."""

    def __init__(self, url: str) -> None:
        self._outcomes: list[Outcome] = []
        self._thread = threading.Thread(target=lambda: self._outcomes.extend(run_streams(url, BODIES)))
        self._thread.start()

    def tokens(self) -> list[list[int]]:
        self._thread.join(120)
        assert [outcome.complete for outcome in self._outcomes] == [True] * len(BODIES)
        return [outcome.token_ids for outcome in self._outcomes]


def test_routers_of_two_releases_serve_together(
    serve: Serve, control_port: int, tmp_path: Path, eventually: Callable[..., None]
) -> None:
    other = _OtherRouter(serve, control_port, tmp_path)
    try:
        own = serve.status()["routers"][0]["http"]

        def addresses() -> list[str]:
            return [router["http"] for router in serve.status()["routers"] if router["http"] != own]

        eventually(lambda: addresses() or other.process.poll() is not None, 60, "that the other router is connected")
        assert other.process.poll() is None, other.log
        urls = [serve.url, f"http://{addresses()[0]}"]
        eventually(lambda: httpx.get(f"{urls[1]}/health/ready").status_code == 200, 20, "that it is ready")
        expected = _Streams(urls[0]).tokens()
        running = [_Streams(url) for url in urls]
        for url in urls:
            eventually(
                lambda url=url: Metrics(url)["headrace_attempts_in_flight"] == len(BODIES), 20, "all are running"
            )
        os.kill(serve.status()["replicas"][0]["ranks"][0]["pid"], signal.SIGKILL)
        for streams in running:
            same_but_for_ties(BODIES, streams.tokens(), expected)
        eventually(lambda: {each["state"] for each in serve.status()["replicas"]} == {"ready"}, 120, "it is rebuilt")
        same_but_for_ties(BODIES, _Streams(urls[1]).tokens(), expected)
        assert serve.status()["problems"] == []
    finally:
        other.close()
    assert other.process.returncode == 0, other.log
