"""A replica: loads the model, sizes its cache, warms up, then serves until it is stopped or its loop dies."""

import gc
import os
import threading
import time
from collections.abc import Callable, Sequence

import structlog

from headrace_kernels import describe
from headrace_proto.errors import EngineDeadError, HeadraceError
from headrace_worker.assembly import RankPart, assemble, assemble_part
from headrace_worker.config import Meeting, ReplicaConfig, ReplicaStarted
from headrace_worker.engine import RunnerBrokenError
from headrace_worker.loop import EngineLoop
from headrace_worker.model.load import LoadedModel
from headrace_worker.parallel.errors import RankLostError
from headrace_worker.parallel.follower import Follower
from headrace_worker.parallel.meeting import MeetingHost
from headrace_worker.parallel.runner import MultiRankRunner
from headrace_worker.parallel.stage import StageRunner
from headrace_worker.parallel.team import Team
from headrace_worker.profiling import ProfileRefusedError, ProfileReport, StepProfiler, Window, make_profiler
from headrace_worker.profiling.stepping import ProfiledStage
from headrace_worker.role import role_number
from headrace_worker.runner.graphs import Recorder
from headrace_worker.runner.sizing import KvSize
from headrace_worker.server.describe import describe as describe_replica
from headrace_worker.server.description import Description
from headrace_worker.server.pairs import PairDesk
from headrace_worker.server.server import ReplicaServer
from headrace_worker.server.servicer import Servicer
from headrace_worker.stepping import choose_recorder
from headrace_worker.transfer.courier import Courier
from headrace_worker.transfer.reports import listen, to_loop, to_rank_0

log = structlog.get_logger(__name__)

Report = Callable[[str, float], None]

STOP_SECONDS = 10.0
LOST_STOP_SECONDS = 0.2  # a step that waits for a lost rank need not end
FOLLOWER_STOP_SECONDS = 4.0
PROFILE_EDGE_SECONDS = 0.3  # after the end of rank 0's window: the other ranks were asked a little later
PROFILE_WRITE_SECONDS = 30.0


class Replica:
    """One rank of one replica, in this process. No Ray here: the cluster room wraps this in an actor.

    Of several ranks, rank 0 opens the meeting and has the engine and the server; the others follow it.
    """

    def __init__(
        self,
        config: ReplicaConfig,
        rank: int = 0,
        report: Report = lambda stage, fraction: None,
        recorder: Recorder | None = None,
    ) -> None:
        """`recorder`: what records steps for replay, on all ranks alike; None means what the device has for it."""
        self._config = config
        self._rank = rank
        self._report = report
        self._recorder = recorder
        self._boot_id = os.urandom(16)
        self._opened: MeetingHost | None = None
        self._team: Team | None = None
        self._follower: Follower | None = None
        self._ranks: MultiRankRunner | None = None
        self._loop: EngineLoop | None = None
        self._server: ReplicaServer | None = None
        self._profiler: StepProfiler | None = None
        self._courier: Courier | None = None
        self._description: Description | None = None

    def open_meeting(self) -> Meeting:
        """Of rank 0 of several: where all ranks, itself included, are to `start`. Raises MeetingError."""
        self._opened = MeetingHost(self._config.host)
        return self._opened.meeting

    def start(self, meeting: Meeting | None = None) -> ReplicaStarted:
        """Blocks until the replica serves. Raises a HeadraceError with a sentence when it cannot.

        With several ranks all must be started at the same `meeting`. When one fails, all do.
        """
        self._profiler = make_profiler(self._config, self._rank)
        if self._profiler is not None:
            self._report("making the profiler ready", 0.0)
            self._profiler.warm_up()
        if meeting is None:
            return self._serve()
        self._report("meeting the other ranks", 0.0)
        self._team = team = Team(self._config, self._rank, meeting, self._opened)
        try:
            return team.watch.guard(self._serve if self._rank == 0 else lambda: self._follow(team))
        except Exception as error:
            team.watch.fail(str(error) if isinstance(error, HeadraceError) else type(error).__name__)
            raise

    def _follow(self, team: Team) -> ReplicaStarted:
        began = time.monotonic()
        part = assemble_part(self._config, self._report, team=team)
        self._courier = part.runner.courier
        if self._courier is not None:
            self._courier.report = to_rank_0(team.watch)
        recorder = self._recorder or choose_recorder(self._config, team.device)
        self._follower = Follower(self._stage(part, team), team, recorder)
        self._follower.start()
        gc.collect()
        gc.freeze()
        team.agree(0)  # pools are made: rank 0 warms all of us up
        team.settle()
        self._report("ready", 1.0)
        return self._started("", part.model, part.size, part.max_model_len, part.max_num_seqs, 0, began)

    def _stage(self, part: RankPart, team: Team) -> StageRunner:
        if self._profiler is None:
            return StageRunner.of(part.model, part.runner, team)
        stage = ProfiledStage.of(part.model, part.runner, team)
        stage.profiler = self._profiler
        return stage

    def _serve(self) -> ReplicaStarted:
        began = time.monotonic()
        config = self._config
        assembly = assemble(config, self._report, team=self._team, profiler=self._profiler, recorder=self._recorder)
        self._ranks = assembly.ranks
        model, size, limits = assembly.model, assembly.size, assembly.limits
        # What was loaded stays for good: a full collection would walk all of it in the middle of a step.
        gc.collect()
        gc.freeze()
        if self._team is not None:
            self._team.settle()
        self._report("listening", 0.0)
        server = self._server = ReplicaServer(config.host, config.port, config.secret)
        loop = self._loop = EngineLoop(assembly.engine, lambda report: server.call_soon(servicer.deliver, report))
        description = self._description = describe_replica(assembly, config, self._boot_id)
        courier = self._courier = assembly.runner.courier
        assert courier is not None
        courier.report = to_loop(loop)
        if self._team is not None:
            listen(self._team.watch, loop)
        desk = PairDesk(lambda: description.identity, courier.shards, loop, config.host, courier.opened)
        servicer = Servicer(description, loop, assembly.kv.start_chain, self._boot_id, desk, config.secret)
        try:
            address = server.start(servicer)
        except BaseException:
            server.stop()
            raise
        loop.exchange(lambda exchange: exchange.compute_for_others(config.role != "decode"))
        loop.start()
        if self._team is not None:
            self._team.watch.call(loop.abandon)
        self._report("ready", 1.0)
        return self._started(
            address,
            model,
            size,
            assembly.max_model_len,
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            began,
            assembly.notes,
        )

    def _started(
        self,
        address: str,
        model: LoadedModel,
        size: KvSize,
        max_len: int,
        seqs: int,
        tokens: int,
        began: float,
        notes: Sequence[str] = (),
    ) -> ReplicaStarted:
        return ReplicaStarted(
            address=address,
            boot_id=self._boot_id,
            pid=os.getpid(),
            device=str(model.device),
            dtype=model.dtype_name,
            revision=model.source.revision,
            threads=model.threads,
            tp=self._config.tp,
            pp=self._config.pp,
            max_model_len=max_len,
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            kv_blocks=size.num_blocks - 1,
            kv_bytes=size.num_bytes,
            block_size=model.layout.block_size,
            weight_bytes=model.weight_bytes,
            load_seconds=time.monotonic() - began,
            notes=[*describe(), *model.notes, *(self._team.notes if self._team is not None else ()), size.note, *notes],
        )

    def wait(self) -> None:
        """Blocks until `stop`. Raises EngineDeadError when the rank's loop ends by itself, or another rank is lost."""
        loop = self._loop or self._follower
        if loop is None:
            raise EngineDeadError("the replica was not started")
        loop.ended.wait()
        failure = loop.failure
        if isinstance(failure, RankLostError | RunnerBrokenError):
            raise EngineDeadError(str(failure)) from failure
        if failure is not None:
            raise EngineDeadError(f"the step loop ended: {type(failure).__name__}") from failure

    def set_role(self, role: str) -> None:
        """Of rank 0, from any thread: what routers are to use the replica for; what runs here goes on.

        Raises UnknownRoleError.
        """
        number = role_number(role)
        if self._description is not None and self._loop is not None:
            self._description.set_role(number)
            self._loop.exchange(lambda exchange: exchange.compute_for_others(role != "decode"))

    def drain(self) -> None:
        """Refuses new requests; those that are here go on."""
        if self._loop is not None:
            self._loop.drain()

    def profile(self, steps: int, seconds: float) -> ProfileReport:
        """Records this rank's next steps, and waits for the trace. All ranks are asked at the same time.

        Raises ProfileRefusedError, ProfileFailedError.
        """
        return self.begin_profile(steps, seconds).wait(seconds + PROFILE_WRITE_SECONDS)

    def begin_profile(self, steps: int, seconds: float) -> Window:
        """As `profile`, but does not wait. Raises ProfileRefusedError."""
        if self._profiler is None:
            raise ProfileRefusedError("this replica has no folder for profiles: serve with --profile DIR")
        window = self._profiler.open(steps, seconds)
        if self._loop is not None:
            # A rank that waits for a step notices nothing, not even that the time is over.
            edge = threading.Timer(seconds + PROFILE_EDGE_SECONDS, self._loop.touch)
            edge.daemon = True
            edge.start()
        return window

    def stop(self) -> None:
        """Ends the loop, then the server once the last frames are out. Idempotent, from any thread.

        Of several ranks all must be stopped: the others end when rank 0 says so.
        """
        lost = self._team is not None and self._team.watch.failure is not None
        if self._loop is not None:
            self._loop.stop(LOST_STOP_SECONDS if lost else STOP_SECONDS)
        if self._ranks is not None:
            ranks, self._ranks = self._ranks, None
            ranks.stop()
        if self._follower is not None:
            self._follower.join(FOLLOWER_STOP_SECONDS)
        if self._courier is not None:
            self._courier.stop()
        if self._team is not None:
            self._team.close()
        if self._server is not None:
            self._server.stop()
