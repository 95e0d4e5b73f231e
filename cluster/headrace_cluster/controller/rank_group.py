"""The actors of one replica: started together, watched, ended together."""

import asyncio
import contextlib
import signal
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec
import ray

from headrace_cluster import ray_names
from headrace_cluster.controller.driver import STOP_SECONDS, Progress, StartFailedError
from headrace_cluster.errors import RoleError
from headrace_cluster.gpu_binding import bind_gpus
from headrace_cluster.naming import ReplicaName
from headrace_cluster.pools import Role
from headrace_cluster.processes import ProcessId
from headrace_cluster.rank_config import ProfileOutcome, StartOrder, StartOutcome
from headrace_worker.config import Meeting, ReplicaStarted

CAUSE_SECONDS = 3.0  # after one rank failed, for the one that is to blame to say why
ROLE_SECONDS = 5.0
WAIT_SECONDS = 20.0  # of one call that waits for a rank's end: the next one follows
DEATH_SECONDS = 0.5  # after one rank ended, for Ray to say that another was killed


@dataclass(slots=True)
class RankGroup:
    """The ranks of a build, in rank order."""

    name: ReplicaName
    cluster: str
    actors: list[Any] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)
    gpus: list[tuple[str, list[str]]] = field(default_factory=list)  # node, and what Ray keeps for the rank
    processes: list[ProcessId] = field(default_factory=list)  # of ranks on this node

    async def start(self) -> ReplicaStarted:
        """Rank 0's facts once all ranks are ready. Raises StartFailedError with the sentence of the rank to blame."""
        meeting = None
        if len(self.actors) > 1:
            meeting = (await self._ask(0, self.actors[0].open_meeting.remote())).meeting
        calls = [asyncio.ensure_future(self._start_rank(rank, meeting)) for rank in range(len(self.actors))]
        try:
            await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            if any(call.done() and call.exception() is not None for call in calls):
                await asyncio.wait(calls, timeout=CAUSE_SECONDS)
            errors = [error for call in calls if call.done() and (error := call.exception()) is not None]
            if errors:
                raise min(errors, key=_blame)
            return calls[0].result()
        finally:
            for call in calls:
                call.cancel()

    async def progress(self) -> Progress | None:
        """How far the slowest rank is; None when it cannot be told."""
        try:
            async with asyncio.timeout(2):
                reports = await asyncio.gather(*(actor.progress.remote() for actor in self.actors))
        except (TimeoutError, ray.exceptions.RayError):
            return None
        return Progress(*min(reports, key=lambda report: report[1])) if reports else None

    async def died(self) -> str:
        """Returns when the first rank ends; the sentence prefers a rank that was killed to those that saw it."""
        waits = [asyncio.ensure_future(self._rank_died(rank)) for rank in range(len(self.actors))]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(waits, timeout=DEATH_SECONDS if len(waits) > 1 else 0)
            ends = [wait.result() for wait in waits if wait.done()]
            return next((sentence for killed, sentence in ends if killed), ends[0][1])
        finally:
            for wait in waits:
                wait.cancel()

    async def profile(self, steps: int, seconds: float) -> list[ProfileOutcome]:
        """What a profile brought, in rank order: of all ranks at the same time. Never raises."""
        calls = (self._profile_rank(rank, steps, seconds) for rank in range(len(self.actors)))
        return await asyncio.gather(*calls)

    async def set_role(self, role: Role) -> None:
        """Tells rank 0, which speaks for the replica. Raises RoleError."""
        try:
            async with asyncio.timeout(ROLE_SECONDS):
                await self.actors[0].set_role.remote(str(role))
        except TimeoutError as error:
            raise RoleError(f"{self._called(0)} does not answer: its role stays as it was") from error
        except ray.exceptions.RayError as error:
            raise RoleError(f"{self._called(0)} has just ended: ask again when it is ready") from error

    async def call_all(self, method: str, seconds: float = STOP_SECONDS) -> None:
        """Calls a method of every rank and waits for them, but not for ever. Never raises."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                calls = (getattr(actor, method).remote() for actor in self.actors)
                await asyncio.gather(*calls, return_exceptions=True)  # a dead rank has nothing left to stop

    def kill(self) -> None:
        """Ends every process of it."""
        for rank in range(len(self.actors)):
            ray_names.kill_actor(self.name.rank(rank), self.cluster)
        for process in self.processes:
            process.signal(signal.SIGKILL)  # a stopped process does not hear Ray

    async def _start_rank(self, rank: int, meeting: Meeting | None) -> ReplicaStarted:
        binding = bind_gpus(self.gpus)[rank]
        order = StartOrder(meeting) if binding is None else StartOrder(meeting, binding.visible, binding.index)
        outcome = await self._ask(rank, self.actors[rank].start.remote(msgspec.msgpack.encode(order)))
        if outcome.started is None:
            raise StartFailedError(f"{self._called(rank)} said nothing about its start", final=True)
        return outcome.started

    async def _ask(self, rank: int, call: Coroutine[Any, Any, bytes]) -> StartOutcome:
        try:
            encoded = await call
        except ray.exceptions.RayActorError as error:
            raise StartFailedError(
                f"{self._called(rank)} was killed while it started; if memory is short, lower --kv-cache-memory, "
                "--replicas, or take a smaller model",
                final=False,
            ) from error
        except ray.exceptions.RayError as error:
            raise StartFailedError(f"{self._called(rank)} failed to start: {error}", final=False) from error
        outcome = msgspec.msgpack.decode(encoded, type=StartOutcome)
        if outcome.error:
            raise StartFailedError(outcome.error, final=outcome.final, secondary=outcome.secondary)
        return outcome

    async def _profile_rank(self, rank: int, steps: int, seconds: float) -> ProfileOutcome:
        try:
            encoded = await self.actors[rank].profile.remote(steps, seconds)
        except ray.exceptions.RayError:
            return ProfileOutcome(error=f"{self._called(rank)} was killed while it was profiled")
        return msgspec.msgpack.decode(encoded, type=ProfileOutcome)

    async def _rank_died(self, rank: int) -> tuple[bool, str]:
        """Whether it was killed, and the sentence."""
        try:
            while (cause := await self.actors[rank].wait.remote(WAIT_SECONDS)) is None:
                pass  # it lives
            return False, f"{self._called(rank)} ended: {cause}"
        except ray.exceptions.RayError:
            return True, f"{self._called(rank)} was killed"

    def _called(self, rank: int) -> str:
        pid = f" (process {self.pids[rank]})" if rank < len(self.pids) else ""
        return f"rank {rank} of {self.name.replica_id}{pid}"


def _blame(error: BaseException) -> int:
    """Smallest for the error that explains most: a sentence of its own, then a killed rank, then who saw it go."""
    if not isinstance(error, StartFailedError):
        return 0
    return 3 if error.secondary else 1 if error.final else 2
