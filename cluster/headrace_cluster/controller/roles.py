"""Changes the role of a running replica in place: nothing is loaded again, its requests continue."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from headrace_cluster.core.driver import ReplicaDriver
from headrace_cluster.core.reconciler import Reconciler
from headrace_cluster.core.record import Record, State, another_answers, unconnected_peer
from headrace_cluster.errors import RoleError
from headrace_proto.role import Role, UnknownRoleError, parse_role


def no_such_replica(records: Mapping[str, Record], replica_id: str) -> str:
    """The sentence for an id that does not exist."""
    return f"there is no replica {replica_id!r}; there are: {', '.join(records)}"


class Roles:
    """Role changes, one at a time."""

    def __init__(self, reconciler: Reconciler, driver: ReplicaDriver, publish: Callable[[], Awaitable[None]]) -> None:
        self._reconciler = reconciler
        self._driver = driver
        self._publish = publish
        self._lock = asyncio.Lock()

    async def change(self, replica_id: str, new_role: str) -> dict[str, Any]:
        """Changes a role; returns once the replica and the member list have it. Raises RoleError."""
        began = time.monotonic()
        async with self._lock:
            record, role = self._check(replica_id, new_role)
            before, name = record.role, record.name
            # Before the call to the replica: during the call no other decision may rely on its old role.
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

    def _check(self, replica_id: str, new_role: str) -> tuple[Record, Role]:
        records = self._reconciler.records
        try:
            role = parse_role(new_role)
        except UnknownRoleError as error:
            raise RoleError(str(error)) from None
        if replica_id not in records:
            raise RoleError(no_such_replica(records, replica_id))
        record = records[replica_id]
        if record.state is not State.READY or record.held:
            raise RoleError(f"{replica_id} is {record.state}: its role can be changed while it is ready")
        if self._reconciler.surges.following(record) is not None:
            raise RoleError(f"{replica_id} is being rolled: its role can be changed when that is done")
        if not role.decodes and not another_answers(records, record):
            raise RoleError(
                unconnected_peer(records, record)
                or f"{replica_id} is the only ready replica of {record.model.name} that can decode: as {role} it would "
                "leave no replica to serve requests; give another one the role decode or both first"
            )
        return record, role
