"""One rank of a replica, as the process that runs it sees it: start, wait, stop, and what an operator may change."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future

from headrace_base.cluster_member import ClusterMember, ClusterSecret
from headrace_base.errors import EngineDeadError, HeadraceError
from headrace_proto.block_hash import derive_key
from headrace_proto.role import parse_role
from headrace_worker.comm.errors import RankLostError
from headrace_worker.comm.interface import rank_host
from headrace_worker.comm.rendezvous import RendezvousHost
from headrace_worker.core.config import Rendezvous, ReplicaConfig, ReplicaStarted
from headrace_worker.core.progress import Progress, ignore_progress
from headrace_worker.core.step_runner import RunnerBrokenError
from headrace_worker.device.choice import open_device
from headrace_worker.device.rank_device import RankDevice
from headrace_worker.profiling.profiler import StepProfiler, Window, make_profiler
from headrace_worker.profiling.report import ProfileRefusedError, ProfileReport
from headrace_worker.ranks.join import join_team
from headrace_worker.ranks.team import Team
from headrace_worker.replica.following_rank import FollowingRank
from headrace_worker.replica.serving_rank import ServingRank

PROFILE_DELAY_SECONDS = 0.3  # after the end of rank 0's window: those of the other ranks started a little later
PROFILE_WRITE_SECONDS = 30.0


class Replica:
    """One rank of one replica, in this process. No Ray here: the `cluster` package wraps this in an actor.

    With several ranks, rank 0 opens the rendezvous and has the engine and the server; the others run its commands.
    All that exists only while the rank runs is in its `ServingRank` or `FollowingRank`.
    """

    def __init__(
        self,
        config: ReplicaConfig,
        secret: ClusterSecret,
        rank: int = 0,
        report: Progress = ignore_progress,
        device: Callable[[str], RankDevice] = open_device,
    ) -> None:
        """secret: of the cluster, for rank 0, which has the server and hashes blocks; it may change while it serves.

        `device`: opens the rank's device, by the name in `config`. Called once, before anything else of the start.
        """
        self._config = config
        self._member = ClusterMember(secret, config.internal_tls)
        self._cache_key = derive_key(secret.values[0])
        self._rank = rank
        self._report = report
        self._open_device = device
        self._boot_id = os.urandom(16)
        self._opened: RendezvousHost | None = None
        self._team: Team | None = None
        self._profiler: StepProfiler | None = None
        self._running: ServingRank | FollowingRank | None = None
        self._end_watch: Callable[[], None] = lambda: None

    def open_rendezvous(self) -> Rendezvous:
        """On rank 0 of several: the rendezvous to pass to `start` of all ranks. Raises RendezvousError."""
        self._opened = RendezvousHost(rank_host(self._config))
        return self._opened.rendezvous

    def start(self, rendezvous: Rendezvous | None = None) -> ReplicaStarted:
        """Blocks until the replica serves. Raises a HeadraceError with a sentence when it cannot.

        With several ranks all must be started with the same `rendezvous`. When one fails, all do.
        """
        device = self._open_device(self._config.device)
        device.use()
        if rendezvous is None:
            running = self._start_steps(device, None).result()
            started = running.await_ready()
        else:
            self._report("connecting to the other ranks", 0.0)
            self._team = team = join_team(self._config, device, self._rank, rendezvous, self._opened)
            try:
                running = team.detector.guard(self._start_steps(device, team).result)
                started = running.await_ready()
            except Exception as error:
                team.detector.fail(str(error) if isinstance(error, HeadraceError) else type(error).__name__)
                raise
        self._end_watch = device.watch_faults(running.fail)
        return started

    def _start_steps(self, device: RankDevice, team: Team | None) -> "Future[ServingRank | FollowingRank]":
        """Starts the thread that loads, warms up and runs all steps: one, so that OpenMP has one team of threads."""
        built: Future[ServingRank | FollowingRank] = Future()

        def run() -> None:
            try:
                device.use()
                self._running = running = self._build(device, team)
            except BaseException as error:
                built.set_exception(error)
            else:
                built.set_result(running)
                running.loop.run()

        threading.Thread(target=run, name="headrace-steps", daemon=True).start()
        return built

    def _build(self, device: RankDevice, team: Team | None) -> ServingRank | FollowingRank:
        self._profiler = make_profiler(self._config, self._rank)
        if self._profiler is not None:
            self._report("preparing the profiler", 0.0)
            self._profiler.warm_up()
        if team is not None and self._rank:
            return FollowingRank(self._config, self._boot_id, self._report, team, self._profiler)
        own = (self._config, self._member, self._cache_key, self._boot_id)
        return ServingRank(*own, self._report, device, team, self._profiler)

    def wait(self) -> None:
        """Blocks until `stop`. Raises EngineDeadError when the rank's loop fails, or another rank is lost."""
        if self._running is None:
            raise EngineDeadError("the replica was not started")
        loop = self._running.loop
        loop.ended.wait()
        failure = loop.failure
        if isinstance(failure, RankLostError | RunnerBrokenError):
            raise EngineDeadError(str(failure)) from failure
        if failure is not None:
            raise EngineDeadError(f"the step loop ended: {type(failure).__name__}") from failure

    def set_role(self, name: str) -> None:
        """On rank 0, from any thread: changes the replica's role for routers; current requests continue.

        Raises UnknownRoleError.
        """
        role = parse_role(name)
        if isinstance(self._running, ServingRank):
            self._running.set_role(role)

    def drain(self) -> None:
        """Refuses new requests; current ones continue."""
        if isinstance(self._running, ServingRank):
            self._running.loop.drain()

    def profile(self, steps: int, seconds: float) -> ProfileReport:
        """Records this rank's next steps, and waits for the trace. To be called on all ranks at the same time.

        Raises ProfileRefusedError, ProfileFailedError.
        """
        return self.begin_profile(steps, seconds).wait(seconds + PROFILE_WRITE_SECONDS)

    def begin_profile(self, steps: int, seconds: float) -> Window:
        """As `profile`, but does not wait. Raises ProfileRefusedError."""
        if self._profiler is None:
            raise ProfileRefusedError("this replica has no folder for profiles: serve with --profile DIR")
        window = self._profiler.open(steps, seconds)
        if isinstance(self._running, ServingRank):
            # A rank that waits for a step does not check the deadline.
            timer = threading.Timer(seconds + PROFILE_DELAY_SECONDS, self._running.loop.run_empty_step)
            timer.daemon = True
            timer.start()
        return window

    def stop(self) -> None:
        """Ends the loop, then the server once the last frames are sent. Idempotent, from any thread.

        With several ranks all must be stopped: the others end when rank 0 sends `Stop`.
        """
        self._end_watch()
        if self._running is not None:
            self._running.stop()
        elif self._team is not None:
            self._team.close()
