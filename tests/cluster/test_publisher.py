"""The member list names each build as the controller knows it, whatever the build claims in its messages."""

import asyncio
from types import SimpleNamespace
from typing import Any

from headrace_cluster.controller.publisher import Publisher
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.record import State
from headrace_proto.replica_pb2 import ReplicaHealth, ReplicaIdentity
from headrace_proto.role import Role


def test_what_a_replica_claims_to_be_is_not_published() -> None:
    """Its reports would count for another build, or enlarge the list beyond what routers receive."""
    name = ReplicaName("m-1", 2)
    claimed = ReplicaIdentity(replica_id="m-0", generation=9, revision="x" * 100_000)
    started = SimpleNamespace(boot_id=b"b", model="m", revision="r", dtype="float32", address="127.0.0.1:1")
    build = SimpleNamespace(started=started, health=ReplicaHealth(identity=claimed))
    reconciler = SimpleNamespace(builds=lambda: [SimpleNamespace(name=name, state=State.READY, role=Role.DECODE)])
    lists: list[Any] = []

    async def publish(members: Any, models: Any) -> None:
        lists.append(members)

    membership: Any = SimpleNamespace(publish=publish)
    spec: Any = SimpleNamespace(models=[])
    publisher = Publisher(spec, reconciler, {name: build}, membership, 5)  # type: ignore[arg-type, dict-item]
    asyncio.run(publisher.publish())
    ((member,),) = lists
    identity = member.identity
    assert (identity.replica_id, identity.generation, identity.revision) == ("m-1", 2, "r")
    assert identity.role == Role.DECODE.number and member.ByteSize() < 200
