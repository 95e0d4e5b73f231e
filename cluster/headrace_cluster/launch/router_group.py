"""The routers of one `serve`: a single one, or several that share their ports, each supervised separately."""

import http.client
import ssl
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from headrace_cluster.core.view import RouterPlace
from headrace_cluster.errors import RouterFailedError
from headrace_cluster.launch.router_process import RouterProcess, router_config
from headrace_cluster.local.ports import reachable
from headrace_cluster.local.tls_client import open_connection, pinned
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_proto.address import host_port, split_address
from headrace_router.api.port_reservation import PortReservation

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
