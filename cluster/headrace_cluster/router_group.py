"""The routers of one `serve`: one alone on its ports, or several that share them, each supervised for itself."""

import http.client
from collections.abc import Sequence

from headrace_cluster.controller.view import RouterPlace
from headrace_cluster.errors import RouterFailedError
from headrace_cluster.ports import reachable
from headrace_cluster.router_process import RouterProcess, router_config
from headrace_cluster.spec import ClusterSpec
from headrace_router.port_guard import PortGuard


class RouterGroup:
    """Not thread-safe; create it in the main thread, with which the routers die."""

    def __init__(self, spec: ClusterSpec, controller: str, secret: bytes) -> None:
        """Takes the ports, if they are to be shared. Raises ListenError."""
        routers = spec.routers
        self._host = routers.host
        self._guards: list[PortGuard] = []
        config = router_config(spec, controller, secret)
        if routers.count == 1:
            self._processes = [RouterProcess(config)]
            return
        self._guards.append(PortGuard(routers.host, routers.port, "HTTP", "--port"))
        self._guards.append(PortGuard(routers.host, routers.grpc_port, "gRPC", "--grpc-port"))
        shared = {"port": self._guards[0].port, "grpc_port": self._guards[1].port, "share_port": True}
        self._processes = []
        for index in range(routers.count):
            own = {"metrics_port": routers.metrics_port + index if routers.metrics_port else 0}
            # A new config each time draws a new router id.
            each = router_config(spec, controller, secret).model_copy(update=shared | own)
            self._processes.append(RouterProcess(each, f"router {index + 1} of {routers.count}"))

    def start(self) -> None:
        """Starts them all; that they serve shows at the controller."""
        for process in self._processes:
            process.start()

    def places(self, known: Sequence[RouterPlace]) -> list[RouterPlace]:
        """Where ours listen, in their order, of all that the controller knows; empty until it knows every one."""
        by_pid = {place.pid: place for place in known}
        if any(process.pid not in by_pid for process in self._processes):
            return []
        found = [by_pid[process.pid or 0] for process in self._processes]
        for process, place in zip(self._processes, found, strict=True):
            metrics = port_of(place.metrics) if place.metrics != place.http else None
            process.keep_ports(port_of(place.http), port_of(place.grpc) if place.grpc else 0, metrics)
        return found

    def ready(self, places: Sequence[RouterPlace]) -> bool:
        """Whether every router itself says that it is ready, at the address that is its own."""
        return bool(places) and all(_answers(self._host, port_of(place.metrics)) for place in places)

    def watch(self, *, may_restart: bool) -> list[str]:
        """Starts again what died; a sentence for each that was just noticed. Raises RouterFailedError."""
        return [news for process in self._processes if (news := process.watch(may_restart=may_restart))]

    def stop(self) -> None:
        """Lets requests in flight finish within the routers' own limit, then ends all."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.await_end()
        for guard in self._guards:
            guard.close()


def port_of(address: str) -> int:
    """The port of 'host:port'. Raises RouterFailedError."""
    try:
        return int(address.rpartition(":")[2])
    except ValueError:
        raise RouterFailedError(f"the router says that it listens on '{address}', which is no address") from None


def _answers(host: str, port: int) -> bool:
    connection = http.client.HTTPConnection(reachable(host).strip("[]"), port, timeout=2)
    try:
        connection.request("GET", "/health/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
