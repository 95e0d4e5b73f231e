"""Listens to one replica's step loop."""

import asyncio
from collections.abc import Callable

import grpc

from headrace_cluster.spec import HealthSpec
from headrace_proto import replica_pb2 as pb
from headrace_proto import replica_pb2_grpc
from headrace_proto.secret import secret_metadata

_OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.max_reconnect_backoff_ms", 1000))


async def watch_health(
    address: str, secret: bytes, health: HealthSpec, hear: Callable[[pb.ReplicaHealth], None]
) -> None:
    """Calls `hear` with every health message, until cancelled. A broken stream is opened again: silence tells."""
    request = pb.HealthRequest(interval_ms=max(50, int(health.interval_seconds * 1e3)))
    async with grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
        stub = replica_pb2_grpc.ReplicaStub(channel)
        while True:
            try:
                async for message in stub.WatchHealth(request, metadata=secret_metadata(secret)):
                    hear(message)
            except grpc.aio.AioRpcError:
                pass
            await asyncio.sleep(health.interval_seconds)
