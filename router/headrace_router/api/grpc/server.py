"""The public gRPC server: API, health and reflection on one port."""

from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from headrace_proto import inference_pb2
from headrace_proto.address import host_port
from headrace_proto.inference_pb2_grpc import add_InferenceServicer_to_server
from headrace_router.api.grpc.inference_servicer import InferenceService, KeyInterceptor
from headrace_router.api.listen import listen_error
from headrace_router.api.services import Services

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name


class GrpcServer:
    """Binds in `start`, so that a port in use raises an error instead of a log line of gRPC."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._health: Any = health.aio.HealthServicer()
        self._server: Any = None
        self._serving: bool | None = None

    async def start(self, host: str, port: int) -> int:
        """Listens; returns the port. Raises ListenError."""
        limits = self._services.config.limits
        options = [
            ("grpc.so_reuseport", int(self._services.config.share_port)),
            ("grpc.max_receive_message_length", limits.body_bytes),
            ("grpc.max_metadata_size", limits.header_bytes),
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ]
        self._server = grpc.aio.server(interceptors=[KeyInterceptor(self._services.auth)], options=options)
        add_InferenceServicer_to_server(InferenceService(self._services), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        try:
            bound = int(self._server.add_insecure_port(host_port(host, port)))
        except RuntimeError as error:
            raise listen_error("gRPC", "--grpc-port", host, port) from error
        if bound == 0:
            raise listen_error("gRPC", "--grpc-port", host, port)
        await self.update_health()
        await self._server.start()
        return bound

    async def update_health(self) -> None:
        """Sets the gRPC health status from the router's readiness."""
        serving = self._services.ready
        if serving == self._serving:
            return
        self._serving = serving
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE):
            await self._health.set(name, status)

    async def stop(self, seconds: float) -> None:
        """Accepts no new calls, and ends running ones after `seconds`."""
        if self._server is not None:
            await self._server.stop(seconds)
