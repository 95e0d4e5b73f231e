"""The actors of one replica: started together, watched, ended together."""

import asyncio
import contextlib
import signal
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec
import ray
import ray.util

from headrace_cluster.core.driver import ROLE_SECONDS, STOP_SECONDS, Progress, RankFacts, StartFailedError
from headrace_cluster.core.gpu_binding import bind_gpus
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.rank_config import ProfileOutcome, StartArgs, StartOutcome
from headrace_cluster.errors import RoleError
from headrace_cluster.local.processes import ProcessId
from headrace_cluster.local.run_logs import rank_log_path
from headrace_cluster.ray import names as ray_names
from headrace_proto.role import Role
from headrace_worker.core.config import Rendezvous, ReplicaStarted

CAUSE_SECONDS = 3.0  # after one rank failed, for the rank with the cause to report it
CREATE_SECONDS = 120.0  # from the place of a build until all its processes answer; they import no engine before that
WAIT_SECONDS = 20.0  # of one call that waits for a rank's end; then it is repeated
UNAVAILABLE_SECONDS = 0.1  # until a rank that could not be reached is asked again: Ray may know its end a moment later
DEATH_SECONDS = 2.0  # after one rank ended, for Ray to report that another was killed

# Other errors of Ray do not show that a rank has ended.
_KILLED = (ray.exceptions.RayActorError, ray.exceptions.NodeDiedError, ray.exceptions.ActorPlacementGroupRemoved)


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where the process of a rank is."""

    pid: int
    node: str
    gpus: Sequence[str]  # that Ray assigned
    process: ProcessId | None = None  # if it is on this node

    @classmethod
    def of(cls, pid: int, node: str, gpus: Sequence[str]) -> Self:
        """Of a rank that is alive now."""
        return cls(pid, node, gpus, ProcessId.of(pid) if node == str(ray.util.get_node_ip_address()) else None)


class RankGroup:
    """The ranks of a build. `actors` and `places` are in rank order; without places `locate` asks the ranks."""

    def __init__(
        self,
        name: ReplicaName,
        cluster: str,
        actors: Sequence[Any],
        places: Sequence[RankPlace] = (),
        log_folder: str = "",
    ) -> None:
        """log_folder: of the ranks; empty: none."""
        self.name = name
        self._cluster = cluster
        self._actors = actors
        self._places = places
        self._log_folder = log_folder

    @property
    def actors(self) -> Sequence[Any]:
        """In rank order."""
        return self._actors

    def place(self, places: Sequence[RankPlace], log_folder: str) -> None:
        """The ranks are there, by what they report."""
        self._places, self._log_folder = places, log_folder or self._log_folder

    async def locate(self) -> list[RankFacts]:
        """Waits for every rank's process. Raises StartFailedError when one could not be created, or not in time."""
        try:
            async with asyncio.timeout(CREATE_SECONDS):
                facts = await asyncio.gather(*(actor.facts.remote() for actor in self._actors))
        except ray.exceptions.RayError as error:
            raise StartFailedError(
                f"a rank of {self.name.replica_id} could not be created: {error}", final=False
            ) from error
        except TimeoutError as error:  # the GCS was lost meanwhile, and its leases keep the place: a new place helps
            raise StartFailedError(
                f"{self.name.replica_id} has a place, but Ray created no process for a rank within "
                f"{CREATE_SECONDS:g} s; it is built again; if this repeats, see Ray's logs",
                final=False,
            ) from error
        self._places = [RankPlace.of(pid, node, gpus) for pid, node, gpus in facts]
        return [RankFacts(rank, place.pid, place.node) for rank, place in enumerate(self._places)]

    async def set_secret(self, values: tuple[bytes, ...]) -> None:
        """Makes the ranks members of the cluster, or gives them the values that are valid now. Raises errors of Ray."""
        await asyncio.gather(*(actor.set_secret.remote(values) for actor in self._actors))

    async def start(self) -> ReplicaStarted:
        """Rank 0's facts once all ranks are ready. Raises StartFailedError with the sentence of the causing rank."""
        rendezvous = None
        if len(self._actors) > 1:
            call = self._actors[0].open_rendezvous.remote(self._start_args(0))
            rendezvous = (await self._start_outcome(0, call)).rendezvous
        calls = [asyncio.ensure_future(self._start_rank(rank, rendezvous)) for rank in range(len(self._actors))]
        try:
            await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            if any(call.done() and call.exception() is not None for call in calls):
                await asyncio.wait(calls, timeout=CAUSE_SECONDS)
            errors = [error for call in calls if call.done() and (error := call.exception()) is not None]
            if errors:
                raise min(errors, key=_error_rank)
            return calls[0].result()
        finally:
            for call in calls:
                call.cancel()

    async def progress(self) -> Progress | None:
        """Progress of the slowest rank; None when it is unknown."""
        try:
            async with asyncio.timeout(2):
                reports = await asyncio.gather(*(actor.progress.remote() for actor in self._actors))
        except (TimeoutError, ray.exceptions.RayError):
            return None
        return Progress(*min(reports, key=lambda report: report[1])) if reports else None

    async def wait_for_death(self) -> str:
        """Returns when the first rank ends. The sentence names a killed rank before ranks that ended because of it.

        Raises an error of Ray when it does not answer: the ranks may be alive.
        """
        waits = [asyncio.ensure_future(self._wait_for_rank(rank)) for rank in range(len(self._actors))]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(waits, timeout=DEATH_SECONDS if len(waits) > 1 else 0)
            ends = [wait.result() for wait in waits if wait.done()]
            return next((sentence for killed, sentence in ends if killed), ends[0][1])
        finally:
            for wait in waits:
                wait.cancel()

    async def profile(self, steps: int, seconds: float) -> list[ProfileOutcome]:
        """Profiles all ranks at the same time; returns the outcomes in rank order. Never raises."""
        calls = (self._profile_rank(rank, steps, seconds) for rank in range(len(self._actors)))
        return await asyncio.gather(*calls)

    async def set_role(self, role: Role, number: int) -> None:
        """Sends the role to rank 0, which represents the replica. number: see ReplicaDriver. Raises RoleError."""
        call = self._actors[0].set_role.remote
        try:
            async with asyncio.timeout(ROLE_SECONDS):
                await call(str(role), number)
        except TimeoutError as error:
            raise RoleError(f"{self._label(0)} does not answer: its role stays as it was") from error
        except ray.exceptions.RayError as error:
            raise RoleError(f"{self._label(0)} has just ended: ask again when it is ready") from error

    async def drain(self, held: bool) -> None:
        """Stops every rank from accepting requests. held: whether an operator drains it.

        Raises an error of Ray or TimeoutError when a rank that may be alive has not replied.
        """
        async with asyncio.timeout(STOP_SECONDS):
            calls = (actor.drain.remote(held) for actor in self._actors)
            results = await asyncio.gather(*calls, return_exceptions=True)
        for error in results:
            unavailable = isinstance(error, ray.exceptions.ActorUnavailableError)
            if isinstance(error, BaseException) and (unavailable or not isinstance(error, _KILLED)):
                raise error

    async def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Ends every rank's engine; waits for them up to `seconds`. Never raises."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                calls = (actor.stop.remote() for actor in self._actors)
                await asyncio.gather(*calls, return_exceptions=True)  # a dead rank has nothing to stop

    def kill(self) -> None:
        """Ends every process of the build."""
        for rank in range(len(self._actors)):
            ray_names.kill_actor(self.name.rank(rank), self._cluster)
        for place in self._places:
            if place.process is not None:
                place.process.signal(signal.SIGKILL)  # a stopped process does not handle Ray's request

    async def _start_rank(self, rank: int, rendezvous: Rendezvous | None) -> ReplicaStarted:
        outcome = await self._start_outcome(rank, self._actors[rank].start.remote(self._start_args(rank, rendezvous)))
        if outcome.started is None:
            raise StartFailedError(f"{self._label(rank)} reported nothing about its start", final=True)
        return outcome.started

    def _start_args(self, rank: int, rendezvous: Rendezvous | None = None) -> bytes:
        """Encoded."""
        binding = bind_gpus([(place.node, place.gpus) for place in self._places])[rank]
        args = StartArgs(rendezvous) if binding is None else StartArgs(rendezvous, binding.visible, binding.index)
        return msgspec.msgpack.encode(args)

    async def _start_outcome(self, rank: int, call: Coroutine[Any, Any, bytes]) -> StartOutcome:
        try:
            encoded = await call
        except ray.exceptions.RayActorError as error:
            raise StartFailedError(
                f"{self._label(rank)} was killed while it started; if memory is short, lower --kv-cache-memory, "
                f"--replicas, or take a smaller model{self._log_hint(rank)}",
                final=False,
            ) from error
        except ray.exceptions.RayError as error:
            raise StartFailedError(
                f"{self._label(rank)} failed to start: {error}{self._log_hint(rank)}", final=False
            ) from error
        outcome = msgspec.msgpack.decode(encoded, type=StartOutcome)
        if outcome.error:
            raise StartFailedError(
                outcome.error, final=outcome.final, secondary=outcome.secondary, lacks_resources=outcome.lacks_resources
            )
        return outcome

    async def _profile_rank(self, rank: int, steps: int, seconds: float) -> ProfileOutcome:
        try:
            encoded = await self._actors[rank].profile.remote(steps, seconds)
        except ray.exceptions.RayError:
            return ProfileOutcome(error=f"{self._label(rank)} was killed while it was profiled")
        return msgspec.msgpack.decode(encoded, type=ProfileOutcome)

    async def _wait_for_rank(self, rank: int) -> tuple[bool, str]:
        """Returns when the rank ends: whether it was killed, and the sentence."""
        while True:
            try:
                cause = await self._actors[rank].wait.remote(WAIT_SECONDS)
            except ray.exceptions.ActorUnavailableError:  # the network, or Ray's GCS: the rank may be alive
                await asyncio.sleep(UNAVAILABLE_SECONDS)
            except _KILLED:
                return True, f"{self._label(rank)} was killed{self._log_hint(rank)}"
            else:
                if cause is not None:
                    return False, f"{self._label(rank)} ended: {cause}{self._log_hint(rank)}"

    def _log_hint(self, rank: int) -> str:
        """The end of a sentence about a rank."""
        if not self._log_folder:
            return ""
        return f"; its log: {rank_log_path(Path(self._log_folder), self.name.replica_id, rank)}"

    def _label(self, rank: int) -> str:
        pid = f" (process {self._places[rank].pid})" if self._places else ""
        return f"rank {rank} of {self.name.replica_id}{pid}"


def _error_rank(error: BaseException) -> int:
    """Smallest for the error closest to the cause: a named error, then a killed rank, then a rank that lost another."""
    if not isinstance(error, StartFailedError):
        return 0
    return 3 if error.secondary else 1 if error.final else 2
