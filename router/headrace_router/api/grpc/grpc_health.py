"""grpc.health.v1.Health: readiness, without a key."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from grpc_health.v1.health import SERVICE_NAME
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthServicer

HEALTH_PREFIX = f"/{SERVICE_NAME}/"


class Health(HealthServicer):  # type: ignore[misc]
    """One status for the server and its services. A watcher that does not read blocks no other caller."""

    def __init__(self, services: Sequence[str]) -> None:
        self._names = {"", *services}
        self._serving = False
        self._changed = asyncio.Event()  # set when this status changes; the next status gets a new event

    def set(self, serving: bool) -> None:
        if serving != self._serving:
            self._serving = serving
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    async def Check(self, request: HealthCheckRequest, context: Any) -> HealthCheckResponse:
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return self._response(request)

    async def Watch(self, request: HealthCheckRequest, context: Any) -> AsyncIterator[HealthCheckResponse]:
        while True:
            changed = self._changed
            yield self._response(request)
            await changed.wait()

    def _response(self, request: HealthCheckRequest) -> HealthCheckResponse:
        if request.service not in self._names:
            return HealthCheckResponse(status=HealthCheckResponse.SERVICE_UNKNOWN)
        serving, refusing = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
        return HealthCheckResponse(status=serving if self._serving else refusing)
