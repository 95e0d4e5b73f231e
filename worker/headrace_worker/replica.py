"""A replica: loads the model, sizes its cache, warms up, then serves until it is stopped or its loop fails."""

import gc
import os
import threading
import time
from collections.abc import Callable, Sequence

import structlog

from headrace_kernels import describe
from headrace_proto.errors import EngineDeadError, HeadraceError
from headrace_proto.role import parse_role
from headrace_worker.assembly.assemble import RankPart, assemble, assemble_part
from headrace_worker.assembly.loop import EngineLoop
from headrace_worker.assembly.stepping import choose_recorder
from headrace_worker.comm.errors import RankLostError
from headrace_worker.comm.rendezvous import RendezvousHost
from headrace_worker.core.config import Rendezvous, ReplicaConfig, ReplicaStarted
from headrace_worker.core.engine import RunnerBrokenError
from headrace_worker.core.kv.sizing import KvSize
from headrace_worker.kv_transfer.transfer_worker import TransferWorker
from headrace_worker.model.load import LoadedModel
from headrace_worker.profiling import ProfileRefusedError, ProfileReport, StepProfiler, Window, make_profiler
from headrace_worker.profiling.stepping import ProfiledStage
from headrace_worker.ranks.follower import Follower
from headrace_worker.ranks.runner import MultiRankRunner
from headrace_worker.ranks.stage import StageRunner
from headrace_worker.ranks.team import Team
from headrace_worker.runner.graphs import Recorder
from headrace_worker.server.describe import describe as describe_replica
from headrace_worker.server.description import Description
from headrace_worker.server.pairs import PairRegistry
from headrace_worker.server.server import ReplicaServer
from headrace_worker.server.servicer import Servicer
from headrace_worker.server.transfer_reports import forward_notes, to_loop, to_rank_0

log = structlog.get_logger(__name__)

Report = Callable[[str, float], None]

STOP_SECONDS = 10.0
LOST_STOP_SECONDS = 0.2  # a step that waits for a lost rank may not end
FOLLOWER_STOP_SECONDS = 4.0
PROFILE_DELAY_SECONDS = 0.3  # after the end of rank 0's window: those of the other ranks started a little later
PROFILE_WRITE_SECONDS = 30.0


class Replica:
    """One rank of one replica, in this process. No Ray here: the `cluster` package wraps this in an actor.

    With several ranks, rank 0 opens the rendezvous and has the engine and the server; the others run its commands.
    """

    def __init__(
        self,
        config: ReplicaConfig,
        rank: int = 0,
        report: Report = lambda stage, fraction: None,
        recorder: Recorder | None = None,
    ) -> None:
        """`recorder`: records steps for replay, of the same kind on all ranks; None: the device's own recorder."""
        self._config = config
        self._rank = rank
        self._report = report
        self._recorder = recorder
        self._boot_id = os.urandom(16)
        self._opened: RendezvousHost | None = None
        self._team: Team | None = None
        self._follower: Follower | None = None
        self._ranks: MultiRankRunner | None = None
        self._loop: EngineLoop | None = None
        self._server: ReplicaServer | None = None
        self._profiler: StepProfiler | None = None
        self._transfers: TransferWorker | None = None
        self._description: Description | None = None

    def open_rendezvous(self) -> Rendezvous:
        """On rank 0 of several: the rendezvous to pass to `start` of all ranks. Raises RendezvousError."""
        self._opened = RendezvousHost(self._config.host)
        return self._opened.rendezvous

    def start(self, rendezvous: Rendezvous | None = None) -> ReplicaStarted:
        """Blocks until the replica serves. Raises a HeadraceError with a sentence when it cannot.

        With several ranks all must be started with the same `rendezvous`. When one fails, all do.
        """
        self._profiler = make_profiler(self._config, self._rank)
        if self._profiler is not None:
            self._report("preparing the profiler", 0.0)
            self._profiler.warm_up()
        if rendezvous is None:
            return self._serve()
        self._report("connecting to the other ranks", 0.0)
        self._team = team = Team(self._config, self._rank, rendezvous, self._opened)
        try:
            return team.detector.guard(self._serve if self._rank == 0 else lambda: self._follow(team))
        except Exception as error:
            team.detector.fail(str(error) if isinstance(error, HeadraceError) else type(error).__name__)
            raise

    def _follow(self, team: Team) -> ReplicaStarted:
        started = time.monotonic()
        part = assemble_part(self._config, self._report, team=team)
        self._transfers = part.transfers
        if self._transfers is not None:
            self._transfers.report = to_rank_0(team.detector)
        recorder = self._recorder or choose_recorder(self._config, team.device)
        self._follower = Follower(self._stage(part, team), team, recorder)
        self._follower.start()
        gc.collect()
        gc.freeze()
        team.gather_all(0)  # pools are allocated: rank 0 warms all ranks up
        team.barrier()
        self._report("ready", 1.0)
        return self._started("", part.model, part.size, part.max_model_len, part.max_num_seqs, 0, started)

    def _stage(self, part: RankPart, team: Team) -> StageRunner:
        if self._profiler is None:
            return StageRunner.of(part.model, part.runner, team)
        stage = ProfiledStage.of(part.model, part.runner, team)
        stage.profiler = self._profiler
        return stage

    def _serve(self) -> ReplicaStarted:
        started = time.monotonic()
        config = self._config
        assembly = assemble(config, self._report, team=self._team, profiler=self._profiler, recorder=self._recorder)
        self._ranks = assembly.ranks
        model, size, limits = assembly.model, assembly.size, assembly.limits
        # Loaded objects are never freed: a full collection would traverse all of them in the middle of a step.
        gc.collect()
        gc.freeze()
        if self._team is not None:
            self._team.barrier()
        self._report("listening", 0.0)
        server = self._server = ReplicaServer(config.host, config.port, config.secret)
        loop = self._loop = EngineLoop(assembly.engine, lambda report: server.call_soon(servicer.deliver, report))
        description = self._description = describe_replica(assembly, config, self._boot_id)
        transfers = self._transfers = assembly.transfers
        assert transfers is not None
        transfers.report = to_loop(loop)
        if self._team is not None:
            forward_notes(self._team.detector, loop)
        pair_registry = PairRegistry(
            lambda: description.identity, transfers.shards, loop, config.host, transfers.set_rendezvous_host
        )
        servicer = Servicer(description, loop, assembly.kv.start_chain, self._boot_id, pair_registry, config.secret)
        try:
            address = server.start(servicer)
        except BaseException:
            server.stop()
            raise
        loop.exchange(lambda exchange: exchange.compute_for_others(parse_role(config.role).prefills))
        loop.start()
        if self._team is not None:
            self._team.detector.on_loss(loop.abandon)
        self._report("ready", 1.0)
        return self._started(
            address,
            model,
            size,
            assembly.max_model_len,
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            started,
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
        started: float,
        notes: Sequence[str] = (),
    ) -> ReplicaStarted:
        return ReplicaStarted(
            model=self._config.model,
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
            load_seconds=time.monotonic() - started,
            defaults=model.facts.defaults,
            notes=[*describe(), *model.notes, *(self._team.notes if self._team is not None else ()), size.note, *notes],
        )

    def wait(self) -> None:
        """Blocks until `stop`. Raises EngineDeadError when the rank's loop fails, or another rank is lost."""
        loop = self._loop or self._follower
        if loop is None:
            raise EngineDeadError("the replica was not started")
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
        if self._description is not None and self._loop is not None:
            self._description.set_role(role.number)
            self._loop.exchange(lambda exchange: exchange.compute_for_others(role.prefills))

    def drain(self) -> None:
        """Refuses new requests; current ones continue."""
        if self._loop is not None:
            self._loop.drain()

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
        if self._loop is not None:
            # A rank that waits for a step does not check the deadline.
            timer = threading.Timer(seconds + PROFILE_DELAY_SECONDS, self._loop.run_empty_step)
            timer.daemon = True
            timer.start()
        return window

    def stop(self) -> None:
        """Ends the loop, then the server once the last frames are sent. Idempotent, from any thread.

        With several ranks all must be stopped: the others end when rank 0 sends `Stop`.
        """
        lost = self._team is not None and self._team.detector.failure is not None
        if self._loop is not None:
            self._loop.stop(LOST_STOP_SECONDS if lost else STOP_SECONDS)
        if self._ranks is not None:
            ranks, self._ranks = self._ranks, None
            ranks.stop()
        if self._follower is not None:
            self._follower.join(FOLLOWER_STOP_SECONDS)
        if self._transfers is not None:
            self._transfers.stop()
        if self._team is not None:
            self._team.close()
        if self._server is not None:
            self._server.stop()
