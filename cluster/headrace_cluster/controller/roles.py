"""Changes the role of a running replica in place: nothing is loaded again, what runs there goes on."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from headrace_cluster.controller.driver import ReplicaDriver
from headrace_cluster.controller.reconciler import Reconciler, Record, State
from headrace_cluster.errors import RoleError
from headrace_cluster.pools import Role
from headrace_proto import replica_pb2

ROLE_NUMBERS = {
    Role.BOTH: replica_pb2.ROLE_BOTH,
    Role.PREFILL: replica_pb2.ROLE_PREFILL,
    Role.DECODE: replica_pb2.ROLE_DECODE,
}


def another_answers(records: Mapping[str, Record], record: Record) -> bool:
    """Whether requests for the model can go somewhere else."""
    return any(
        other.answers and other.model.name == record.model.name for other in records.values() if other is not record
    )


def no_such_replica(records: Mapping[str, Record], replica_id: str) -> str:
    """The sentence for an id that does not exist."""
    return f"there is no replica {replica_id!r}; there are: {', '.join(records)}"


class Roles:
    """Flips, one at a time."""

    def __init__(self, reconciler: Reconciler, driver: ReplicaDriver, publish: Callable[[], Awaitable[None]]) -> None:
        self._reconciler = reconciler
        self._driver = driver
        self._publish = publish
        self._turn = asyncio.Lock()

    async def flip(self, replica_id: str, wanted: str) -> dict[str, Any]:
        """Gives a replica another role; returns once it knows and the new member list is out. Raises RoleError."""
        began = time.monotonic()
        async with self._turn:
            record, role = self._allowed(replica_id, wanted)
            before, name = record.role, record.name
            # Before the replica is asked: while that takes, nothing may count on it for what it is to give up.
            record.role = role
            try:
                await self._driver.set_role(name, role)
            except RoleError:
                if record.name == name:
                    record.role = before
                raise
            finally:
                await self._publish()
        seconds = round(time.monotonic() - began, 4)
        return {"id": replica_id, "generation": name.generation, "role": role, "before": before, "seconds": seconds}

    def _allowed(self, replica_id: str, wanted: str) -> tuple[Record, Role]:
        records = self._reconciler.records
        if wanted not in list(Role):
            raise RoleError(f"a role is prefill, decode or both, not {wanted!r}")
        if replica_id not in records:
            raise RoleError(no_such_replica(records, replica_id))
        record, role = records[replica_id], Role(wanted)
        if record.state is not State.READY or record.held:
            raise RoleError(f"{replica_id} is {record.state}: its role can be changed while it is ready")
        if not role.decodes and not another_answers(records, record):
            raise RoleError(
                f"{replica_id} is the only ready replica of {record.model.name} that can decode: as {role} it would "
                "leave nobody to answer; give another one the role decode or both first"
            )
        return record, role
