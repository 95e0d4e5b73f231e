"""A rank that runs the commands of rank 0."""

from headrace_worker.assembly.assemble import assemble_part
from headrace_worker.assembly.stepping import choose_recorder
from headrace_worker.assembly.transfers import to_rank_0
from headrace_worker.core.config import ReplicaConfig, ReplicaStarted
from headrace_worker.core.progress import Progress
from headrace_worker.profiling.profiler import StepProfiler
from headrace_worker.profiling.stepping import ProfiledStage
from headrace_worker.ranks.follower import Follower
from headrace_worker.ranks.stage import StageRunner
from headrace_worker.ranks.team import Team
from headrace_worker.replica.start_facts import freeze_loaded, start_facts

STOP_SECONDS = 4.0


class FollowingRank:
    """Any rank but rank 0. Once it is constructed its loop may run, and rank 0 warms it up."""

    def __init__(
        self,
        config: ReplicaConfig,
        boot_id: bytes,
        report: Progress,
        team: Team,
        profiler: StepProfiler | None = None,
    ) -> None:
        """Blocks until all ranks can run steps. Raises a HeadraceError with a sentence when this one cannot start."""
        part = assemble_part(config, to_rank_0(team.detector), report, team=team, device=team.device)
        model, runner = part.model, part.runner
        stage = StageRunner(model, runner, team) if profiler is None else ProfiledStage(model, runner, team, profiler)
        self._team = team
        self._transfers = part.transfers
        self.loop = Follower(stage, team, choose_recorder(config, team.device) if part.records else None)
        if part.transfers is not None:
            part.transfers.on_failure = self.fail
        freeze_loaded()
        team.gather_all(0)  # pools are allocated: rank 0 warms all ranks up
        self._report = report
        self._facts = start_facts(
            config,
            boot_id,
            model,
            part.size,
            address="",
            max_model_len=part.max_model_len,
            max_num_seqs=part.max_num_seqs,
            max_num_batched_tokens=0,
            team_notes=team.notes,
        )

    def await_ready(self) -> ReplicaStarted:
        """Blocks until all ranks are warm, while the loop runs. Raises RankLostError."""
        self._team.barrier()
        self._report("ready", 1.0)
        return self._facts

    def fail(self, sentence: str) -> None:
        """The device is defective: all ranks end at once."""
        self._team.detector.fail(sentence)

    def stop(self) -> None:
        """Waits for rank 0's `Stop`, then ends the connections. Idempotent."""
        self.loop.join(STOP_SECONDS)
        if self._transfers is not None:
            self._transfers.stop()
        self._team.close()
