"""The actors of one build of a replica, and what each of them last reported."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import ray
import ray.util

from headrace_cluster.core.driver import ROLE_SECONDS, STOP_SECONDS, Progress, RankFacts, StartFailedError
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.rank_config import ENDED, UP, ProfileOutcome, RankReport, Stage
from headrace_cluster.errors import RoleError
from headrace_cluster.local.processes import ProcessId
from headrace_cluster.local.run_logs import rank_log_path
from headrace_cluster.ray import names as ray_names
from headrace_proto.role import Role
from headrace_worker.core.config import ReplicaStarted

CAUSE_SECONDS = 3.0  # after one rank failed, for the rank with the cause to report it
CREATE_SECONDS = 120.0  # from the place of a build until all its processes answer; they import no engine before that
REPORT_SECONDS = 20.0  # of one call that waits for another report; then it is repeated
STARTING_SECONDS = 0.2  # between two reports of a start, whose progress changes often
UNAVAILABLE_SECONDS = 0.1  # until a rank that could not be reached is asked again: Ray may know its end a moment later
DEATH_SECONDS = 2.0  # after one rank ended, for Ray to report that another was killed

# Other errors of Ray do not show that a rank has ended.
_KILLED = (ray.exceptions.RayActorError, ray.exceptions.NodeDiedError, ray.exceptions.ActorPlacementGroupRemoved)


class RankGroup:
    """Watches the ranks from its creation to `close`; lists are in rank order. For one event loop."""

    def __init__(self, name: ReplicaName, cluster: str, actors: Sequence[Any], log_folder: str = "") -> None:
        """log_folder: of the ranks; empty: none."""
        self.name = name
        self.reports: list[RankReport | None] = [None] * len(actors)  # none: it has not replied yet
        self.killed: set[int] = set()  # Ray reports that these have ended
        self.is_foreign = False  # a report is of another version of Headrace
        self._cluster = cluster
        self._actors = actors
        self._log_folder = log_folder
        self._processes: dict[int, ProcessId] = {}  # of those on this node
        self._changed = asyncio.Event()
        self._watches = [asyncio.create_task(self._watch(rank)) for rank in range(len(actors))]

    def close(self) -> None:
        """Ends the watch, and leaves the ranks alone."""
        for watch in self._watches:
            watch.cancel()

    async def replied(self) -> None:
        """Returns when every rank has reported, or one has ended."""
        await self._wait_for(lambda: None not in self.reports or self.killed or self.is_foreign)

    async def locate(self) -> list[RankFacts]:
        """Waits for every rank's process. Raises StartFailedError when one could not be created, or not in time."""
        try:
            async with asyncio.timeout(CREATE_SECONDS):
                await self.replied()
        except TimeoutError as error:  # the GCS was lost meanwhile, and its leases keep the place: a new place helps
            raise StartFailedError(
                f"{self.name.replica_id} has a place, but Ray created no process for a rank within "
                f"{CREATE_SECONDS:g} s; it is built again; if this repeats, see Ray's logs",
                final=False,
            ) from error
        if self.killed:
            raise StartFailedError(f"a rank of {self.name.replica_id} could not be created", final=False)
        return [
            RankFacts(rank, report.pid, report.node) for rank, report in enumerate(self.reports) if report is not None
        ]

    async def started(self) -> ReplicaStarted:
        """Rank 0's facts once all ranks are ready. Raises StartFailedError with the sentence of the causing rank."""
        await self._wait_for(lambda: self._failed() or self._started() is not None)
        if self._failed():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CAUSE_SECONDS):
                    await self._wait_for(lambda: len(self._failed()) == len(self.reports))
            raise min(self._failed(), key=_distance_to_cause)
        started = self._started()
        assert started is not None
        return started

    @property
    def progress(self) -> Progress | None:
        """Of the slowest rank that starts; None without one."""
        starting = [report for report in self.reports if report is not None and report.stage is Stage.STARTING]
        slowest = min(starting, key=lambda report: report.fraction, default=None)
        return Progress(slowest.progress, slowest.fraction) if slowest is not None else None

    async def ended(self) -> str:
        """Returns when the first rank ends. The sentence names a killed rank before ranks that ended because of it."""
        await self._wait_for(lambda: self.killed or self._loops_ended())
        if len(self.reports) > 1 and not self.killed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DEATH_SECONDS):
                    await self._wait_for(lambda: self.killed)
        for rank in sorted(self.killed):
            return f"{self._label(rank)} was killed{self._log_hint(rank)}"
        rank, cause = self._loops_ended()[0]
        return f"{self._label(rank)} ended: {cause}{self._log_hint(rank)}"

    # -- calls -------------------------------------------------------------------------------------------------

    async def set_secret(self, values: tuple[bytes, ...]) -> None:
        """Makes the ranks members of the cluster, or gives them the values that are valid now. Raises errors of Ray."""
        await asyncio.gather(*(actor.set_secret.remote(values) for actor in self._actors))

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
        """Ends every process of the build. It blocks."""
        for rank in range(len(self._actors)):
            ray_names.kill_actor(self.name.rank(rank), self._cluster)
        for process in self._processes.values():
            process.signal(signal.SIGKILL)  # a stopped process does not handle Ray's request

    # -- the watch ---------------------------------------------------------------------------------------------

    async def _watch(self, rank: int) -> None:
        seen = -1
        while rank not in self.killed and not self.is_foreign:
            try:
                encoded = await self._actors[rank].report.remote(seen, REPORT_SECONDS)
                report = msgspec.msgpack.decode(encoded, type=RankReport)
            except msgspec.ValidationError:
                self.is_foreign = True
            except ray.exceptions.ActorUnavailableError:  # the network, or Ray's GCS: the rank may be alive
                await asyncio.sleep(UNAVAILABLE_SECONDS)
                continue
            except _KILLED:
                self.killed.add(rank)
            except ray.exceptions.RayError:  # Ray does not answer
                await asyncio.sleep(UNAVAILABLE_SECONDS)
                continue
            else:
                if self.reports[rank] is None and report.node == str(ray.util.get_node_ip_address()):
                    self._processes[rank] = ProcessId.of(report.pid)
                self.reports[rank], seen = report, report.version
                self._log_folder = self._log_folder or (str(Path(report.log_path).parent) if report.log_path else "")
                if report.stage is Stage.STARTING:
                    self._changed.set()
                    await asyncio.sleep(STARTING_SECONDS)
            self._changed.set()

    async def _wait_for(self, condition: Callable[[], object]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _started(self) -> ReplicaStarted | None:
        up = [report for report in self.reports if report is not None and report.stage in UP]
        return up[0].started if len(up) == len(self.reports) else None

    def _failed(self) -> list[StartFailedError]:
        """One of each rank that has failed."""
        found = []
        for rank, report in enumerate(self.reports):
            if report is not None and report.stage in ENDED:
                flags = {"secondary": report.secondary, "lacks_resources": report.lacks_resources}
                found.append(StartFailedError(report.error, final=report.final, **flags))
            elif rank in self.killed:
                found.append(self._killed_at_start(rank))
        return found

    def _killed_at_start(self, rank: int) -> StartFailedError:
        return StartFailedError(
            f"{self._label(rank)} was killed while it started; if memory is short, lower --kv-cache-memory, "
            f"--replicas, or take a smaller model{self._log_hint(rank)}",
            final=False,
        )

    def _loops_ended(self) -> list[tuple[int, str]]:
        reports = enumerate(self.reports)
        return [(rank, report.error) for rank, report in reports if report is not None and report.stage in ENDED]

    async def _profile_rank(self, rank: int, steps: int, seconds: float) -> ProfileOutcome:
        try:
            encoded = await self._actors[rank].profile.remote(steps, seconds)
        except ray.exceptions.RayError:
            return ProfileOutcome(error=f"{self._label(rank)} was killed while it was profiled")
        return msgspec.msgpack.decode(encoded, type=ProfileOutcome)

    def _log_hint(self, rank: int) -> str:
        """The end of a sentence about a rank."""
        if not self._log_folder:
            return ""
        return f"; its log: {rank_log_path(Path(self._log_folder), self.name.replica_id, rank)}"

    def _label(self, rank: int) -> str:
        report = self.reports[rank]
        return f"rank {rank} of {self.name.replica_id}" + (f" (process {report.pid})" if report is not None else "")


def _distance_to_cause(error: StartFailedError) -> int:
    """Smallest for the error closest to the cause: a named error, then a killed rank, then a rank that lost another."""
    return 3 if error.secondary else 1 if error.final else 2
