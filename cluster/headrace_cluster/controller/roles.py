"""Changes the role of a running replica in place: nothing is loaded again, its requests continue."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import structlog

from headrace_cluster.core.backoff import Backoff
from headrace_cluster.core.driver import ReplicaDriver
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.reconciler import Reconciler
from headrace_cluster.core.record import Record, State, another_answers, unconnected_peer
from headrace_cluster.errors import RoleError
from headrace_proto.role import Role, UnknownRoleError, parse_role

log = structlog.get_logger(__name__)

RESEND = Backoff(1.0, 30.0)  # until a role that a build does not report is sent again


def no_such_replica(records: Mapping[str, Record], replica_id: str) -> str:
    """The sentence for an id that does not exist."""
    return f"there is no replica {replica_id!r}; there are: {', '.join(records)}"


class Roles:
    """Role changes, one at a time."""

    def __init__(
        self,
        reconciler: Reconciler,
        driver: ReplicaDriver,
        publish: Callable[[], Awaitable[None]],
        clock: Callable[[], float],
        jitter: Callable[[], float],
    ) -> None:
        self._reconciler = reconciler
        self._driver = driver
        self._publish = publish
        self._clock = clock
        self._jitter = jitter
        self._lock = asyncio.Lock()
        # By replica: how often its role was sent again, and until when it is not.
        self._sent: dict[str, tuple[int, float]] = {}

    async def change(self, replica_id: str, new_role: str) -> dict[str, Any]:
        """Changes a role; returns once the replica and the member list have it. Raises RoleError."""
        began = time.monotonic()
        async with self._lock:
            record, role = self._check(replica_id, new_role)
            before, name = record.role, record.name
            # Before the call to the replica: during the call no other decision may rely on its old role.
            _decide(record, role)
            try:
                await self._driver.set_role(name, role, record.role_number)
            except BaseException:
                if record.name == name:
                    _decide(record, before)  # the call may still arrive: `correct` sends this one
                raise
            finally:
                await self._publish()
        seconds = round(time.monotonic() - began, 4)
        return {"id": replica_id, "generation": name.generation, "role": role, "before": before, "seconds": seconds}

    def differs(self, name: ReplicaName, reported: int) -> bool:
        """Whether its role is to be sent again to a build, which reports this one (a number of the contract; 0: none).

        To be called for each health message: one from before a change arrives late, so that the first does not count.
        """
        record = self._reconciler.records.get(name.replica_id)
        if record is None or record.name != name or not record.running:
            return False
        if reported in (record.role.number, 0):
            self._sent.pop(name.replica_id, None)
            return False
        now = self._clock()
        times, not_before = self._sent.setdefault(name.replica_id, (0, now + RESEND.seconds(1, self._jitter)))
        if now < not_before or self._lock.locked():
            return False
        self._sent[name.replica_id] = times + 1, now + RESEND.seconds(times + 2, self._jitter)
        return True

    async def correct(self, name: ReplicaName) -> None:
        """Sends a build the role that its record has."""
        async with self._lock:
            record = self._reconciler.records.get(name.replica_id)
            if record is None or record.name != name:
                return
            # A new decision: the rank may know one of the last controller that has a higher number than the record's.
            _decide(record, record.role)
            log.warning("a replica has another role than it should: it is sent again", replica=name.replica_id)
            with contextlib.suppress(RoleError):  # its next health message shows it
                await self._driver.set_role(name, record.role, record.role_number)

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


def _decide(record: Record, role: Role) -> None:
    record.role = role
    record.role_number += 1
