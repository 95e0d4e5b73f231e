"""The public gRPC server: API, health and reflection on one port."""

from typing import Any

import grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_reflection.v1alpha import reflection

from headrace_base.address import host_port
from headrace_router.access.tls_files import TlsFiles
from headrace_router.api.grpc.grpc_health import Health
from headrace_router.api.grpc.inference_servicer import (
    SERVICE,
    InferenceService,
    KeyInterceptor,
)
from headrace_router.api.listen import listen_error
from headrace_router.api.services import Services
from headrace_router.config import RouterConfig

PENDING_CALLS = 16_384


class GrpcServer:
    """Binds in `start`, so that a port in use raises an error instead of a log line of gRPC."""

    def __init__(self, services: Services, tls: TlsFiles | None = None) -> None:
        """tls: None = plain HTTP/2."""
        self._services = services
        self._tls = tls
        self._health = Health((SERVICE,))
        self._server: Any = None

    async def start(self, host: str, port: int) -> int:
        """Listens; returns the port. Raises ListenError."""
        # No bound on calls in all: calls for health, which need no key, would use it up. Admission bounds the others.
        self._server = grpc.aio.server(
            interceptors=[KeyInterceptor(self._services.auth)],
            options=_options(self._services.config),
        )
        self._server.add_generic_rpc_handlers((InferenceService(self._services).handler(),))
        add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, HEALTH_SERVICE, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        try:
            bound = self._listen(host_port(host, port))
        except RuntimeError as error:
            raise listen_error("gRPC", "--grpc-port", host, port) from error
        if bound == 0:
            raise listen_error("gRPC", "--grpc-port", host, port)
        self.update_health()
        await self._server.start()
        return bound

    def _listen(self, address: str) -> int:
        if self._tls is None:
            return int(self._server.add_insecure_port(address))
        return int(self._server.add_secure_port(address, self._tls.grpc_credentials()))

    def update_health(self) -> None:
        """Sets the gRPC health status from the router's readiness."""
        self._health.set(self._services.ready)

    async def stop(self, seconds: float) -> None:
        """Accepts no new calls, and ends running ones after `seconds`."""
        if self._server is not None:
            await self._server.stop(seconds)


def _options(config: RouterConfig) -> list[tuple[str, int]]:
    limits = config.limits
    return [
        ("grpc.so_reuseport", int(config.share_port)),
        ("grpc.max_allowed_incoming_connections", limits.connections),
        ("grpc.max_concurrent_streams", limits.streams_per_connection),
        # Calls that have arrived and wait for their turn. Beyond it gRPC cancels any: those with a key, too, because of
        # a burst of calls without one, each of which is refused in its turn.
        ("grpc.server.max_pending_requests", PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", 2 * PENDING_CALLS),
        ("grpc.max_receive_message_length", limits.body_bytes),
        ("grpc.max_metadata_size", limits.header_bytes),
        ("grpc.absolute_max_metadata_size", limits.header_bytes),
        ("grpc.server_handshake_timeout_ms", int(limits.header_seconds * 1000)),
        ("grpc.max_connection_idle_ms", int(limits.idle_seconds * 1000)),
        # A client that ended without closing its connection is detected after 40 s.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", 2),
    ]
