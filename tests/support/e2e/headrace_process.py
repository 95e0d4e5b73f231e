"""`headrace serve` as users start it: a separate process, identified by its output, checked from outside."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from support.ports import free_port

START_SECONDS = 120
SMALL = ("--max-model-len", "2048", "--kv-cache-memory", "512MiB")  # pages are allocated when they are first used
TWO_SMALL = ("--max-model-len", "2048", "--kv-cache-memory", "128MiB", "--replicas", "2", "--cpu-threads", "1")
UNREACHABLE_RAY = "192.0.2.55:6379"  # a documentation address (RFC 5737): no Ray answers there


def eventually(
    condition: Callable[[], object], seconds: float, what: str = "the condition", every: float = 0.05
) -> None:
    """Returns once the condition holds; fails when it does not in time. every: seconds between two looks."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {seconds} s"
        time.sleep(every)


def environment(home: Path) -> dict[str, str]:
    """The environment without the caller's settings, and with the address of another Ray, which must not be used."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HEADRACE_", "RAY_"))}
    return kept | {
        "HEADRACE_HOME": str(home),
        "RAY_ADDRESS": UNREACHABLE_RAY,
        "OMP_WAIT_POLICY": "passive",
        "NO_COLOR": "1",
    }


def headrace(home: Path, *arguments: str, seconds: float = 60) -> "subprocess.CompletedProcess[str]":
    """Runs one command to its end."""
    command = [sys.executable, "-m", "headrace_cluster", *arguments]
    options = {"capture_output": True, "text": True, "timeout": seconds, "check": False}
    return subprocess.run(command, env=environment(home), **options)  # type: ignore[call-overload, no-any-return]


@dataclass(frozen=True)
class Socket:
    """Where a process listens."""

    address: str
    port: int
    process: str
    pid: int


class Serve:
    """One `headrace serve` on ports that the system chooses, in its own process group."""

    def __init__(self, home: Path, *flags: str, ports: bool = True) -> None:
        self.home = home
        self.log = home.with_suffix(".log")
        free = ("--port", "0", "--grpc-port", "0", "--admin-port", "0") if ports else ()
        with self.log.open("w") as log, home.with_suffix(".out").open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "headrace_cluster", "serve", *free, *flags],
                env=environment(home),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                start_new_session=True,
            )
        self.processes: dict[int, psutil.Process] = {}
        self.memory_when_ready: dict[int, int] = {}
        self.url = ""
        self.grpc = ""
        self.admin_port = 0

    # -- output -----------------------------------------------------------------------------------------------

    @property
    def stderr_text(self) -> str:
        return self.log.read_text()

    @property
    def stdout_text(self) -> str:
        return self.home.with_suffix(".out").read_text()

    def await_ready(self) -> "Serve":
        """Waits for the banner and for /health/ready."""
        eventually(
            lambda: "Talk to it" in self.stderr_text or self.process.poll() is not None, START_SECONDS, "the banner"
        )
        assert self.process.poll() is None, self.stderr_text
        self.url = self._listed(r"API +(http://\S+)/v1")
        self.grpc = self._listed(r"gRPC +(\S+)")
        self.admin_port = int(self._listed(r"admin +http://[\d.]+:(\d+)"))
        assert httpx.get(f"{self.url}/health/ready", trust_env=False).status_code == 200
        self.record_processes()
        self.memory_when_ready = {pid: self.memory(pid) for pid, process in self.processes.items() if _alive(process)}
        return self

    def _listed(self, pattern: str) -> str:
        found = re.search(rf"^  {pattern}", self.stderr_text, re.MULTILINE)
        assert found, f"the banner has no {pattern}:\n{self.stderr_text}"
        return found[1]

    # -- processes --------------------------------------------------------------------------------------------

    def record_processes(self) -> None:
        """Records every descendant process, so that orphans are still known."""
        root = psutil.Process(self.process.pid)
        self.processes |= {process.pid: process for process in [root, *root.children(recursive=True)]}

    def remaining(self) -> list[str]:
        """Its processes that still run: recorded ones, and any with its home in the environment."""
        found = [process for process in self.processes.values() if _alive(process)]
        mark = f"HEADRACE_HOME={self.home}".encode()
        for process in psutil.process_iter():
            if process.pid not in self.processes and _alive(process) and _in_environment(mark, process.pid):
                found.append(process)
        return [f"{process.pid} {_title(process)}" for process in found]

    def listening(self) -> list[Socket]:
        """Every TCP socket on which one of its processes, Ray's included, listens."""
        self.record_processes()
        found = []
        for process in self.processes.values():
            if _alive(process):
                for connection in process.net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN:
                        address = connection.laddr.ip.removeprefix("::ffff:")
                        found.append(Socket(address, connection.laddr.port, _title(process), process.pid))
        return found

    def memory(self, pid: int) -> int:
        """Resident bytes of one of its processes."""
        return int(psutil.Process(pid).memory_info().rss)

    # -- commands and end -------------------------------------------------------------------------------------

    def run(self, *arguments: str, seconds: float = 60) -> "subprocess.CompletedProcess[str]":
        """A client command against it."""
        return headrace(self.home, *arguments, seconds=seconds)

    def status(self) -> Any:
        """As `headrace status --json`, without a process for it; None while there is no controller."""
        state = json.loads((self.home / f"serve-{self.process.pid}.json").read_text())
        headers = {"Authorization": f"Bearer {state['admin_key']}"}
        try:
            return httpx.get(f"{state['admin_url']}/status", headers=headers, trust_env=False).json()
        except httpx.TransportError:
            return None

    def close(self) -> None:
        """Ends it in any state; its child-process guard ends the rest."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()


class Joined:
    """`headrace controller` and `headrace router` in a Ray that others started; used as a Serve."""

    def __init__(
        self, home: Path, model: str, *flags: str, address: str, no_auth: bool = True, router: tuple[str, ...] = ()
    ) -> None:
        """router: flags of the router alone."""
        home.mkdir(parents=True)
        self.home = home
        self.log = home.with_suffix(".log")
        secret = home / "secret"
        secret.write_text("s" * 32)
        secret.chmod(0o600)
        http, grpc, self.admin_port, control = (free_port() for _ in range(4))
        self.url = f"http://127.0.0.1:{http}"
        self._joins = ("--ray-address", address, "--secret-file", str(secret), *(("--ray-no-auth",) * no_auth))
        self._control = (
            "--admin-port",
            str(self.admin_port),
            "--control-host",
            "127.0.0.1",
            "--control-port",
            str(control),
        )
        self._processes: list[subprocess.Popen[bytes]] = []
        self.controller = self.start_controller(model, *flags)
        # The port is reached once the controller has joined; a router tries until then.
        place = ("--controller", f"127.0.0.1:{control}", "--port", str(http), "--grpc-port", str(grpc))
        self._start("router", *place, *router, "--secret-file", str(secret))

    def start_controller(self, model: str, *flags: str) -> "subprocess.Popen[bytes]":
        """Another one, on the same ports."""
        self.controller = self._start("controller", model, *flags, *self._joins, *self._control)
        return self.controller

    @property
    def stderr_text(self) -> str:
        return self.log.read_text()

    def await_ready(self) -> None:
        """Of the router; ends with what the processes wrote if the controller does."""

        def ready() -> bool:
            assert self.controller.poll() is None, self.stderr_text
            try:
                return httpx.get(f"{self.url}/health/ready", trust_env=False).status_code == 200
            except httpx.TransportError:
                return False

        eventually(ready, START_SECONDS, "that the router is ready")

    def status(self) -> Any:
        """As `headrace status --json`; None while there is no controller."""
        done = headrace(self.home, "status", "--json", "--admin-port", str(self.admin_port))
        return json.loads(done.stdout) if done.returncode == 0 else None

    def close(self) -> None:
        """Ends the cluster and both processes."""
        headrace(self.home, "stop", "--admin-port", str(self.admin_port))
        for process in self._processes:
            process.terminate()
            process.wait(30)

    def _start(self, *command: str) -> "subprocess.Popen[bytes]":
        with self.log.open("a") as log:
            started = subprocess.Popen(
                [sys.executable, "-m", "headrace_cluster", *command], env=environment(self.home), stderr=log, stdout=log
            )
        self._processes.append(started)
        return started


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _in_environment(mark: bytes, pid: int) -> bool:
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:200] or process.name()
    except psutil.Error:
        return "?"
