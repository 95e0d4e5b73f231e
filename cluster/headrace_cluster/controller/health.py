"""Receives the health messages of one replica."""

import asyncio
from collections.abc import Awaitable, Callable

import grpc

from headrace_cluster.core.record import State
from headrace_cluster.spec.process_specs import HealthSpec
from headrace_proto import replica_pb2 as pb
from headrace_proto import replica_pb2_grpc
from headrace_proto.channel_options import NO_PROXY
from headrace_proto.secret import secret_metadata

STATES = {
    pb.REPLICA_STATE_STARTING: State.STARTING,
    pb.REPLICA_STATE_READY: State.READY,
    pb.REPLICA_STATE_DRAINING: State.DRAINING,
    pb.REPLICA_STATE_UNHEALTHY: State.UNHEALTHY,
    pb.REPLICA_STATE_DEAD: State.UNHEALTHY,
}
HealthWatch = Callable[[str, bytes, HealthSpec, Callable[[pb.ReplicaHealth], None]], Awaitable[None]]
_OPTIONS = (*NO_PROXY, ("grpc.max_reconnect_backoff_ms", 1000))


async def watch_health(
    address: str, secret: bytes, health: HealthSpec, on_health: Callable[[pb.ReplicaHealth], None]
) -> None:
    """Calls `on_health` with every health message, until cancelled.

    A broken stream is reopened and not reported: the reconciler detects missing messages.
    """
    request = pb.HealthRequest(interval_ms=max(50, int(health.interval_seconds * 1e3)))
    async with grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
        stub = replica_pb2_grpc.ReplicaStub(channel)
        while True:
            try:
                async for message in stub.WatchHealth(request, metadata=secret_metadata(secret)):
                    on_health(message)
            except grpc.aio.AioRpcError:
                pass
            await asyncio.sleep(health.interval_seconds)
