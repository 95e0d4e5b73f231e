"""Routers: alone, or as child processes of `serve`, one or several on one port, restarted when they die."""

import contextlib
import http.client
import json
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from headrace_cluster.core.view import RouterPlace
from headrace_cluster.errors import RouterFailedError, SpecError
from headrace_cluster.launch.display import show_message
from headrace_cluster.local.ports import reachable
from headrace_cluster.local.processes import set_parent_death_signal
from headrace_cluster.local.run_logs import log_path
from headrace_cluster.local.tls_client import open_connection, pinned
from headrace_cluster.program import program_name
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_cluster.spec.process_specs import RoutersSpec
from headrace_proto.address import host_port, port_of, split_address
from headrace_proto.logs import LogConfig, stderr
from headrace_router.access.auth import ApiKey, check_exposure, check_metrics_exposure
from headrace_router.api.port_reservation import PortReservation
from headrace_router.config import RouterConfig

RESTART_SECONDS = (0.2, 1.0, 2.0, 5.0)  # delay before the next attempt; the last one repeats
STABLE_SECONDS = 60.0
EXIT_CONFIG = 2


def router_config(
    spec: ClusterSpec,
    controller: str,
    secret_file: Path,
    *,
    index: int = 0,
    log_folder: Path | None = None,
    **own: Any,
) -> RouterConfig:
    """The config of one start of the router with this index. Without a folder it logs to stderr only.

    own: other values than those of the spec.
    """
    routers, metrics_ports = spec.routers, spec.metrics_ports
    part = f"router {index + 1}" if routers.count > 1 else "router"
    path = str(log_path(log_folder, part)) if log_folder is not None else ""
    shared = RoutersSpec.model_fields.keys() & RouterConfig.model_fields.keys()  # settings that both name alike
    values = {name: getattr(routers, name) for name in shared} | {
        "metrics_port": metrics_ports[index] if metrics_ports else None,
        "metrics_host": spec.metrics_host,
        "controller": controller,
        "secret_file": secret_file,
        "internal_tls": spec.internal.tls_files,
        "auth": spec.auth,
        "tls": spec.tls,
        "limits": spec.limits,
        "logs": LogConfig(part, path=path, format=spec.logs.format, stderr_level=routers.log_level),
    }
    return RouterConfig(**values | own)


def encode_config(config: RouterConfig) -> str:
    """JSON with the secrets in clear text: for a pipe, never for a log, a file or a command line."""
    data = config.model_dump(mode="json")
    data["auth"]["keys"] = [_clear(key) for key in config.auth.keys]
    data["auth"]["metrics_key"] = config.auth.metrics_key and _clear(config.auth.metrics_key)
    return json.dumps(data)


def decode_config(text: str) -> RouterConfig:
    """The inverse of `encode_config`."""
    return RouterConfig.model_validate_json(text)


def _clear(key: ApiKey) -> dict[str, str]:
    return {"name": key.name, "key": key.key.get_secret_value()}


class RouterProcess:
    """One supervised router. Not thread-safe; create it in the main thread: the router ends when it ends."""

    def __init__(self, configure: Callable[..., RouterConfig], label: str = "the router") -> None:
        """configure: `router_config` for ports."""
        self._configure = configure
        self._ports: dict[str, int | None] = {}  # that are other than those of the spec
        self._was_up = False  # the controller has listed it, whatever happened then
        self._config: RouterConfig | None = None  # of the last start
        self._label = label
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._restart_at: float | None = None
        self._failures = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def router_id(self) -> str:
        """Of the last start; empty before the first one."""
        return self._config.router_id if self._config is not None else ""

    def start(self) -> None:
        """Starts the process under a new id; the controller lists it once it serves."""
        self._config = config = self._configure(**self._ports)
        # The same interpreter and environment; in a session of its own the terminal's Ctrl-C does not reach it.
        # -P: it imports no module of the current folder, which any user may have written.
        program = [sys.executable, "-P", "-m", "headrace_cluster"]
        command = [*program, "router", "--config-stdin", "--parent", str(os.getpid())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=stderr(), start_new_session=True
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(encode_config(config).encode())
        self._started_at = time.monotonic()
        self._restart_at = None

    def note_listed(self, http: int, grpc: int, metrics: int | None = None) -> None:
        """It is up, on these ports: a restarted router listens on the same ones."""
        self._ports = {"port": http, "grpc_port": grpc, "metrics_port": metrics}
        self._was_up = True

    def watch(self, *, serving: bool = False) -> str:
        """Restarts it after it died; returns a sentence when the end was just detected, else an empty string.

        Raises RouterFailedError if it ended without a request to stop and was never up: the next one would end, too.
        serving: clients may have requests in flight, which such an error would end; then it is only restarted.
        """
        now = time.monotonic()
        if self._restart_at is not None:
            return self._try_to_start(now) if now >= self._restart_at else ""
        code = self._process.poll() if self._process is not None else None
        if code is None:
            return ""
        how = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
        if not self._was_up and not serving:
            path = self._config.logs.path if self._config is not None else ""
            raise RouterFailedError(f"{self._label} ended ({how}); its log: {path or 'above'}")
        if now - self._started_at > STABLE_SECONDS:
            self._failures = 0
        return f"{self._label} ended ({how}); starting it again in {self._next_start(now):g} s"

    def _try_to_start(self, now: float) -> str:
        """A start that fails, for example for lack of memory, ends no replica: it is repeated."""
        try:
            self.start()
        except Exception as error:
            delay = self._next_start(now)
            return f"{self._label} could not be started ({error}); trying again in {delay:g} s"
        return ""

    def _next_start(self, now: float) -> float:
        """Seconds until the next start, which is noted."""
        delay = RESTART_SECONDS[min(self._failures, len(RESTART_SECONDS) - 1)]
        self._failures += 1
        self._restart_at = now + delay
        return delay

    def terminate(self) -> None:
        """Requests an orderly stop, without waiting."""
        self._restart_at = None
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def interrupt(self) -> None:
        """Requests a stop that ends requests in flight with an error now."""
        self.terminate()  # SIGINT alone has the same effect as SIGTERM, and shows a traceback during the imports
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """Kills it."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


POLL_SECONDS = 0.02  # while routers end
ABORT_SECONDS = 1.0
MARGIN_SECONDS = 3.0  # added to their own limit: for clients to read the last event, and for a busy machine


class RouterGroup:
    """Not thread-safe; create it in the main thread: the routers end when it ends."""

    def __init__(self, spec: ClusterSpec, controller: str, secret_file: Path, log_folder: Path | None = None) -> None:
        """Reserves the ports if routers share them. Raises ListenError."""
        routers = spec.routers
        self._host = routers.host
        self._tls_cert = spec.tls.cert
        self._shutdown_seconds = routers.shutdown_seconds
        self._reservations: list[PortReservation] = []
        configure = partial(router_config, spec, controller, secret_file, log_folder=log_folder)
        if routers.count == 1:
            self._processes = [RouterProcess(configure)]
            return
        self._reservations.append(PortReservation(routers.host, routers.port, "HTTP", "--port"))
        self._reservations.append(PortReservation(routers.host, routers.grpc_port, "gRPC", "--grpc-port"))
        shared = {"port": self._reservations[0].port, "grpc_port": self._reservations[1].port, "share_port": True}
        self._processes = []
        for index in range(routers.count):
            each = partial(configure, index=index, **shared)
            self._processes.append(RouterProcess(each, f"router {index + 1} of {routers.count}"))

    def start(self) -> None:
        """Starts all of them; the controller lists those that serve."""
        for process in self._processes:
            process.start()

    def places(self, known: Sequence[RouterPlace]) -> list[RouterPlace]:
        """The addresses of our routers, in order, from the controller's list; empty until it contains all of them."""
        by_id = {place.id: place for place in known}
        found = []
        for process in self._processes:
            if (place := by_id.get(process.router_id)) is not None:
                metrics = _split(place.metrics)[1] if place.metrics != place.http else None
                process.note_listed(_split(place.http)[1], _split(place.grpc)[1] if place.grpc else 0, metrics)
                found.append(place)
        return found if len(found) == len(self._processes) else []

    def ready(self, places: Sequence[RouterPlace]) -> bool:
        """Whether every router reports ready on its own address."""
        context = pinned(self._tls_cert) if self._tls_cert is not None else None
        return bool(places) and all(_is_ready(place.metrics, context) for place in places)

    def watch(self, *, serving: bool = False) -> list[str]:
        """Restarts routers that ended; a sentence for each newly detected end.

        Raises RouterFailedError for one that ended and that `places` has never found, unless `serving`.
        """
        return [event for process in self._processes if (event := process.watch(serving=serving))]

    def stop(self, abort: Callable[[], bool] = lambda: False) -> None:
        """Waits for requests in flight within the routers' own limit, then ends all routers.

        abort: polled meanwhile; true ends requests in flight with an error.
        """
        for process in self._processes:
            process.terminate()
        deadline = time.monotonic() + self._shutdown_seconds + MARGIN_SECONDS
        while self._running and time.monotonic() < deadline:
            if abort():
                self.abort_requests(ABORT_SECONDS)
                break
            time.sleep(POLL_SECONDS)
        for process in self._processes:
            process.kill()
        for reservation in self._reservations:
            reservation.close()

    def abort_requests(self, seconds: float) -> None:
        """Has the routers end requests in flight with an error; waits up to `seconds`. May be called in any thread."""
        for process in self._processes:
            process.interrupt()
        deadline = time.monotonic() + seconds
        while self._running and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    @property
    def _running(self) -> bool:
        return any(process.running for process in self._processes)


def reachable_address(address: str) -> str:
    """The address to which a client on this machine connects for 'host:port'. Raises RouterFailedError."""
    host, port = _split(address)
    return host_port(reachable(host), port)


def _split(address: str) -> tuple[str, int]:
    try:
        return split_address(address)
    except ValueError:
        raise RouterFailedError(f"the router reports the address '{address}', which is not valid") from None


def _is_ready(address: str, context: ssl.SSLContext | None) -> bool:
    connection = open_connection(*split_address(reachable_address(address)), 2, context)
    try:
        connection.request("GET", "/health/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def run_router(spec: ClusterSpec, controller: str) -> int:
    """Runs until SIGTERM. Raises HeadraceError."""
    if spec.control.secret_file is None:
        raise SpecError("a router needs the cluster's secret: --secret-file FILE, the same one as of the controller")
    if not port_of(controller):
        raise SpecError(f"--controller must be HOST:PORT, not '{controller}'")
    check_exposure(spec.routers.host, spec.auth)
    check_metrics_exposure(spec.metrics_host, spec.auth, no_auth=spec.routers.metrics_no_auth)
    own = spec.routers
    addresses = f"HTTP {own.host}:{own.port}, gRPC {own.host}:{own.grpc_port}"
    show_message(f"a router starts: {addresses}, controller {controller}")
    return _run(router_config(spec, controller, spec.control.secret_file))


def run_from_stdin(parent: int) -> int:
    """Reads the config from a pipe; the process ends when its parent does."""
    if parent:
        set_parent_death_signal(parent)
    try:
        config = decode_config(sys.stdin.read())
    except (ValueError, KeyError):
        print(
            f"headrace: --config-stdin is for `{program_name()} serve`; otherwise pass --controller and --secret-file",
            file=sys.stderr,
        )
        return EXIT_CONFIG
    return _run(config)


def _run(config: RouterConfig) -> int:
    from headrace_router.main import run

    return run(config)
