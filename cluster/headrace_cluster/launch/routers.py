"""Routers: alone, or as child processes of `serve`, one or several on one port, restarted when they die."""

import http.client
import json
import signal
import ssl
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from headrace_base.address import host_port, port_of, split_address
from headrace_base.logs import LogConfig
from headrace_cluster.core.view import RouterAddresses
from headrace_cluster.errors import SpecError
from headrace_cluster.launch.child_process import ChildProcess
from headrace_cluster.launch.display import show_message
from headrace_cluster.local.processes import set_parent_death_signal
from headrace_cluster.local.run_logs import log_path
from headrace_cluster.local.tls_client import open_connection, pinned, reachable
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_cluster.spec.process_specs import RoutersSpec
from headrace_router.api.listen import PortReservation
from headrace_router.config import END_REQUESTS, RouterConfig


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
    part = _part(spec, index)
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


def encode_config(config: RouterConfig) -> bytes:
    """JSON with the secrets in clear text: for a pipe, never for a log, a file or a command line."""
    return json.dumps(config.model_dump(), default=_clear).encode()


def _clear(value: object) -> str:
    return value.get_secret_value() if isinstance(value, SecretStr) else str(value)


def _part(spec: ClusterSpec, index: int) -> str:
    return f"router {index + 1}" if spec.routers.count > 1 else "router"


POLL_SECONDS = 0.02  # while routers end
MARGIN_SECONDS = 3.0  # beside their own limit: for clients to read the last event, and for a busy machine


class RouterGroup:
    """Not thread-safe; create it in the main thread: the routers end when it ends."""

    def __init__(self, spec: ClusterSpec) -> None:
        """Reserves the ports. Raises ListenError."""
        routers = self._routers = spec.routers
        self._spec = spec
        self._http = PortReservation(routers.host, routers.port, "HTTP", "--port")
        self._grpc = PortReservation(routers.host, routers.grpc_port, "gRPC", "--grpc-port")
        self.http_port, self.grpc_port = self._http.port, self._grpc.port
        self._children: list[ChildProcess] = []
        self._ids = [""] * routers.count  # router id of the last start of each router
        self._metrics_ports = dict(enumerate(spec.metrics_ports))  # by router; one that was chosen is kept
        self._shared = routers.count > 1

    def start(self, controller: str, secret_file: Path, log_folder: Path) -> None:
        """Starts all of them; the controller lists those that serve."""
        if not self._shared:
            self._close()  # it binds the ports for itself alone

        def configure(index: int) -> bytes:
            config = router_config(
                self._spec,
                controller,
                secret_file,
                index=index,
                log_folder=log_folder,
                port=self.http_port,
                grpc_port=self.grpc_port,
                metrics_port=self._metrics_ports.get(index),
                share_port=self._shared,
            )
            self._ids[index] = config.router_id  # random for each start
            return encode_config(config)

        for index in range(self._routers.count):
            label = f"router {index + 1} of {self._routers.count}" if self._shared else "the router"
            log = log_path(log_folder, _part(self._spec, index))
            self._children.append(ChildProcess("router", label, log, partial(configure, index)))
            self._children[-1].start()

    def places(self, known: Sequence[RouterAddresses]) -> list[RouterAddresses]:
        """The addresses of our routers, in order, from the controller's list; empty until it contains all of them."""
        by_id = {place.id: place for place in known}
        for index, (router_id, child) in enumerate(zip(self._ids, self._children, strict=True)):
            if router_id in by_id:
                child.was_up = True
                if index in self._metrics_ports:
                    self._metrics_ports[index] = port_of(by_id[router_id].metrics)
        return [by_id[each] for each in self._ids] if by_id.keys() >= set(self._ids) else []

    def ready(self, known: Sequence[RouterAddresses]) -> bool:
        """Whether every router is in the controller's list, and reports ready on its own address."""
        cert, places = self._spec.tls.cert, self.places(known)
        context = pinned(cert) if cert is not None else None
        return bool(places) and all(_is_ready(place.metrics, context) for place in places)

    def watch(self, *, serving: bool = False) -> list[str]:
        """Restarts routers that ended; a sentence for each newly detected end.

        Raises ChildFailedError for one that ended and that `places` has never found, unless `serving`: clients may have
        requests in flight, which the error would end.
        """
        for child in self._children:
            child.was_up |= serving
        return [event for child in self._children if (event := child.watch())]

    def stop(self, abort: Callable[[], bool] = lambda: False) -> None:
        """Waits for requests in flight within the routers' own limit, then ends all routers.

        abort: polled meanwhile; true ends requests in flight with an error.
        """
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + self._routers.stop_seconds + MARGIN_SECONDS
        while self._running and time.monotonic() < deadline:
            if abort():
                self.abort_requests(MARGIN_SECONDS)
                break
            time.sleep(POLL_SECONDS)
        for child in self._children:
            child.kill()
        self._close()

    def abort_requests(self, seconds: float) -> None:
        """Has the routers end requests in flight with an error; waits up to `seconds`. May be called in any thread."""
        self._signal(END_REQUESTS)
        deadline = time.monotonic() + seconds
        while self._running and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def _signal(self, number: int) -> None:
        for child in self._children:
            child.signal(number)

    def _close(self) -> None:
        self._http.close()
        self._grpc.close()

    @property
    def _running(self) -> bool:
        return any(child.running for child in self._children)


def reachable_address(address: str) -> str:
    """The address to which a client on this machine connects for 'host:port'."""
    host, port = split_address(address)
    return host_port(reachable(host), port)


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
    own = spec.routers
    addresses = f"HTTP {own.host}:{own.port}, gRPC {own.host}:{own.grpc_port}"
    show_message(f"a router starts: {addresses}, controller {controller}")
    return _run(router_config(spec, controller, spec.control.secret_file))


def run_from_stdin(parent: int) -> int:
    """Reads the config from a pipe; the process ends when its parent does."""
    set_parent_death_signal(parent)
    return _run(RouterConfig.model_validate_json(sys.stdin.read()))


def _run(config: RouterConfig) -> int:
    from headrace_router.main import run

    return run(config)
