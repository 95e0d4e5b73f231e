"""A server ends within seconds in every phase and for every kind of stop, and leaves nothing.

Every phase of a start, and a running server, with each way in which a shell, a terminal or a service manager ends a
program. Seconds are printed (`pytest -s -m slow`): the bound holds on an idle machine.
"""

import contextlib
import fcntl
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from support.e2e.headrace_process import START_SECONDS, environment, eventually
from support.ports import free_port

FLAGS = ("--max-model-len", "2048", "--kv-cache-memory", "128MiB", "--cpu-threads", "1")
PHASES = {  # by the process that exists from then on
    "before Ray": "headrace_cluster",
    "Ray starts": "gcs_server",
    "workers start": "/raylet/raylet",
    "the controller starts": "headrace_cluster controller",
    "replicas load": "ray::RankActor",
    "serving": "",
}
TERM, INT, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
WAYS = ("process", "group", "every process", "Ctrl-C", "closed terminal")
END_SECONDS = 5.0


class Terminal:
    """`headrace serve` as the leader of a session, with its own terminal, in plain lines."""

    def __init__(self, home: Path, *before: str) -> None:
        self.home = home
        self.temporary = Path(tempfile.mkdtemp(prefix="hr-", dir="/tmp"))  # short: paths of sockets are limited
        self._primary, secondary = pty.openpty()
        self.url = f"http://127.0.0.1:{free_port()}"
        free = ("--port", self.url.rpartition(":")[2], "--grpc-port", "0", "--admin-port", "0")
        self.process = subprocess.Popen(
            [*before, sys.executable, "-m", "headrace_cluster", "serve", *free, *FLAGS],
            env=environment(home) | {"TMPDIR": str(self.temporary), "TERM": "xterm"},
            stdin=secondary,
            stdout=secondary,
            stderr=secondary,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(secondary)
        self._bytes = b""
        self._family: set[psutil.Process] = set()
        self._closed = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def stderr_text(self) -> str:
        return self._bytes.decode("utf-8", "replace")

    def await_phase(self, phase: str) -> None:
        """Waits for the phase, whatever the terminal shows."""
        reached = self._serves if phase == "serving" else lambda: self._runs(PHASES[phase])
        eventually(lambda: reached() or self.process.poll() is not None, START_SECONDS, phase)
        assert self.process.poll() is None, self.stderr_text
        time.sleep(0.5)

    def _runs(self, program: str) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(self.process.pid)
            return any(program in " ".join(process.cmdline()) for process in (top, *top.children(recursive=True)))
        return False

    def _serves(self) -> bool:
        try:
            return (
                "Talk to it" in self.stderr_text and httpx.get(f"{self.url}/health/ready", trust_env=False).is_success
            )
        except httpx.HTTPError:
            return False

    def running(self) -> list[psutil.Process]:
        """Every descendant process, now or at an earlier call, and any with its home in its environment."""
        mark = f"HEADRACE_HOME={self.home}".encode()
        for process in psutil.process_iter():
            try:
                if mark in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                    self._family |= {process, *process.children(recursive=True)}
            except (OSError, psutil.NoSuchProcess):
                continue
        return [process for process in self._family if process.is_running() and process.status() != "zombie"]

    def end(self, way: str) -> None:
        """Ends it in the given way."""
        running = self.running()
        if way == "process":
            self.process.send_signal(TERM)
        elif way == "group":  # kill -- -PGID; `timeout` does both
            os.killpg(self.process.pid, TERM)
        elif way == "every process":  # systemd, KillMode=control-group
            for process in running:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(TERM)
        elif way == "Ctrl-C":
            os.write(self._primary, b"\x03")
        else:
            self._close()  # the kernel sends SIGHUP to the foreground group

    def remaining(self) -> list[str]:
        """What still exists: processes, files of the state folder, Ray's folders."""
        processes = []
        for process in self.running():
            with contextlib.suppress(psutil.NoSuchProcess):
                processes.append(f"{process.pid} {process.name()}")
        files = [path.name for path in self.home.glob("*") if path.name not in ("logs", "cache")]
        return processes + files + [path.name for path in self.temporary.glob("headrace-*")]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        shutil.rmtree(self.temporary, ignore_errors=True)
        if not self._closed.is_set():
            self._close()

    def _close(self) -> None:
        self._closed.set()
        self._reader.join()  # the kernel keeps a terminal open while a thread reads from it
        os.close(self._primary)

    def _read(self) -> None:
        while not self._closed.is_set():
            try:
                if select.select([self._primary], [], [], 0.05)[0]:
                    self._bytes += os.read(self._primary, 65536)
            except OSError:
                return


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """terminal(): a serve with its own terminal; it is ended after the test."""
    started: list[Terminal] = []

    def make(*before: str) -> Terminal:
        started.append(Terminal(tmp_path / f"home{len(started)}", *before))
        return started[-1]

    yield make
    for each in started:
        each.close()


def _statuses(way: str, phase: str) -> set[int]:
    if phase == "serving":
        return {0}
    number = {"Ctrl-C": INT, "closed terminal": HUP}.get(way, TERM)
    return {128 + number, -number} if phase == "before Ray" else {128 + number}  # Python may still be importing


def _ends(serve: Terminal, way: str, phase: str) -> None:
    before = len(serve.stderr_text)
    began = time.monotonic()
    serve.end(way)
    status = serve.process.wait(90)
    seconds = time.monotonic() - began
    print(f"{phase:22} {way:16} {seconds:5.1f} s  status {status}")
    eventually(lambda: not serve.remaining(), 2, f"that nothing remains, but {serve.remaining()}")
    assert status in _statuses(way, phase), serve.stderr_text
    shown = serve.stderr_text[before:]
    assert "Traceback" not in shown and "rpc_client" not in shown and "GCS" not in shown, shown
    # The seconds of an idle machine; on a busy one, multiplied by its load.
    assert seconds < END_SECONDS * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)), shown


@pytest.mark.parametrize(("phase", "way"), [("Ray starts", "group"), ("replicas load", "closed terminal")])
def test_a_start_that_is_ended(terminal: Callable[..., Terminal], phase: str, way: str) -> None:
    serve = terminal()
    serve.await_phase(phase)
    _ends(serve, way, phase)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_and_way(terminal: Callable[..., Terminal], phase: str, way: str) -> None:
    serve = terminal()
    serve.await_phase(phase)
    _ends(serve, way, phase)


def test_timeout(terminal: Callable[..., Terminal]) -> None:
    serve = terminal("timeout", "4")
    assert serve.process.wait(4 + 90) == 124
    eventually(lambda: not serve.remaining(), 2, "that nothing is left")


@pytest.mark.parametrize("way", ["group", "every process", "Ctrl-C twice", "closed terminal"])
def test_a_stream_ends_with_an_event(terminal: Callable[..., Terminal], way: str) -> None:
    serve = terminal()
    serve.await_phase("serving")
    lines: list[str] = []
    body = {"model": "smollm2", "prompt": "Once", "max_tokens": 1800, "ignore_eos": True, "stream": True}

    def read() -> None:
        with httpx.stream("POST", f"{serve.url}/v1/completions", json=body, timeout=60, trust_env=False) as answer:
            lines.extend(line for line in answer.iter_lines() if line)

    running = threading.Thread(target=read)
    running.start()
    eventually(lambda: len(lines) > 5, 30, "tokens")
    serve.end(way.removesuffix(" twice"))
    if way == "Ctrl-C twice":
        time.sleep(1)
        serve.end("Ctrl-C")
    status = serve.process.wait(90)
    running.join(5)
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert status == (130 if way == "Ctrl-C twice" else 0), serve.stderr_text
    assert "Traceback" not in serve.stderr_text
    eventually(lambda: not serve.remaining(), 2, "that nothing is left")
