"""Receives the health messages of one replica."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from headrace_base.cluster_member import WATCHER, ClusterMember
from headrace_cluster.core.replica_build import State
from headrace_cluster.spec.process_specs import HealthSpec
from headrace_proto import replica_pb2 as pb
from headrace_proto import replica_pb2_grpc

STATES = {
    pb.REPLICA_STATE_STARTING: State.STARTING,
    pb.REPLICA_STATE_READY: State.READY,
    pb.REPLICA_STATE_DRAINING: State.DRAINING,
    pb.REPLICA_STATE_UNHEALTHY: State.UNHEALTHY,
    pb.REPLICA_STATE_DEAD: State.UNHEALTHY,
}
# Address of a replica, times, and what receives its messages: `watch_health` for a member.
HealthWatch = Callable[[str, HealthSpec, Callable[[pb.ReplicaHealth], None]], Awaitable[None]]


async def watch_health(
    member: ClusterMember, address: str, health: HealthSpec, on_health: Callable[[pb.ReplicaHealth], None]
) -> None:
    """Calls `on_health` with every health message, until cancelled.

    A broken stream is reopened and not reported: the reconciler detects missing messages.
    """
    request = pb.HealthRequest(interval_ms=max(50, int(health.interval_seconds * 1e3)))
    while True:
        async with member.channel(address, WATCHER) as channel:
            stub: Any = replica_pb2_grpc.ReplicaStub(channel)
            try:
                async for message in stub.WatchHealth(request, metadata=member.metadata):
                    on_health(message)
            except grpc.aio.AioRpcError:
                pass
        await asyncio.sleep(health.interval_seconds)
