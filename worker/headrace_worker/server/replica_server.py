"""The replica's gRPC server on its own thread."""

import asyncio
import contextlib
import threading
from collections.abc import Callable

import grpc

from headrace_base.address import host_port
from headrace_base.cluster_member import LARGE_MESSAGES, SERVER, ClusterMember
from headrace_base.errors import ListenError
from headrace_proto.replica_pb2_grpc import add_ReplicaServicer_to_server
from headrace_worker.server.servicer import Servicer

STOP_GRACE = 2.0


class ReplicaServer:
    """Binds, serves until stopped. `call_soon` runs a function on its event loop, from any thread."""

    def __init__(self, host: str, ports: tuple[int, int] | None, member: ClusterMember) -> None:
        """ports: the first and the last that it may take; None = any free one."""
        self._host = host
        self._ports = ports or (0, 0)
        self._member = member
        self._loop = asyncio.new_event_loop()
        self._server: grpc.aio.Server | None = None
        self._servicer: Servicer | None = None
        self._thread = threading.Thread(target=self._run, name="headrace-grpc", daemon=True)
        self._thread.start()

    def start(self, servicer: Servicer) -> str:
        """Starts serving; returns the bound "host:port". Raises ListenError."""
        return asyncio.run_coroutine_threadsafe(self._start(servicer), self._loop).result()

    def call_soon(self, function: Callable[..., None], *arguments: object) -> None:
        """Runs a function on the event loop; does nothing once the server is stopped."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def stop(self) -> None:
        """Ends all calls (after a short grace for the last frames) and the thread. Idempotent."""
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(STOP_GRACE + 5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    async def _start(self, servicer: Servicer) -> str:
        self._servicer = servicer
        server = self._member.server((*SERVER, *LARGE_MESSAGES))
        add_ReplicaServicer_to_server(servicer, server)
        port = self._bind(server)
        await server.start()
        self._server = server
        return host_port(self._host, port)

    def _bind(self, server: grpc.aio.Server) -> int:
        """The first port that is free."""
        first, last = self._ports
        for port in range(first, last + 1):
            with contextlib.suppress(RuntimeError):
                if bound := self._member.listen(server, host_port(self._host, port)):
                    return bound
        raise ListenError(
            f"the replica cannot listen on {host_port(self._host, first)}"
            f"{f' to {last}' if last > first else ''}: all ports are in use, or the address is not this machine's"
        )

    async def _stop(self) -> None:
        if self._servicer is not None:
            await self._servicer.close()
        if self._server is not None:
            await self._server.stop(STOP_GRACE)
