"""Rank 0: the engine, the loop that drives it, and the gRPC server."""

from headrace_base.cluster_member import ClusterMember
from headrace_proto.role import Role
from headrace_worker.assembly.assemble import assemble
from headrace_worker.assembly.loop import EngineLoop
from headrace_worker.assembly.step_watch import StepWatch
from headrace_worker.assembly.transfers import forward_notes
from headrace_worker.core.config import ReplicaConfig, ReplicaStarted
from headrace_worker.core.progress import Progress
from headrace_worker.core.step_runner import RunnerBrokenError
from headrace_worker.device.rank_device import RankDevice
from headrace_worker.profiling.profiler import StepProfiler
from headrace_worker.ranks.team import Team
from headrace_worker.replica.start_facts import freeze_loaded, start_facts
from headrace_worker.server.describe import describe
from headrace_worker.server.replica_server import ReplicaServer
from headrace_worker.server.servicer import Servicer
from headrace_worker.server.transfer_peer import TransferPeer

STOP_SECONDS = 10.0
LOST_STOP_SECONDS = 0.2  # a step that waits for a lost rank may not end


class ServingRank:
    """Serves once it is constructed and its loop runs."""

    def __init__(
        self,
        config: ReplicaConfig,
        member: ClusterMember,
        cache_key: bytes,
        boot_id: bytes,
        report: Progress,
        device: RankDevice,
        team: Team | None = None,
        profiler: StepProfiler | None = None,
    ) -> None:
        """Blocks until the replica can serve. Raises a HeadraceError with a sentence when it cannot."""
        assembly = assemble(
            config, report, team=team, profiler=profiler, cache_key=cache_key, device=device, transfers=True
        )
        freeze_loaded()
        if team is not None:
            team.barrier()
        report("listening", 0.0)
        self._team = team
        self._ranks = assembly.ranks
        self._transfers = transfers = assembly.transfers
        assembly.engine.exchange.moves_blocks = transfers is not None
        self._server = server = ReplicaServer(config.host, config.port_range, member)
        # A single rank on a CPU waits for nothing: its step is slow at most.
        watched = team is not None or device.asynchronous
        self._watch = StepWatch(lambda: assembly.engine.longest_step, self.fail) if watched else None
        try:
            self.loop = loop = EngineLoop(
                assembly.engine,
                lambda done: server.call_soon(servicer.deliver, done),
                assembly.commands,
                watch=self._watch,
            )
            self._description = description = describe(assembly, config, boot_id, cache_key)
            if team is not None:
                forward_notes(team.detector, loop.commands)
            shards = transfers.shards if transfers is not None else None
            peer = TransferPeer(lambda: description.identity, shards, loop.commands)
            servicer = Servicer(description, loop, assembly.kv.start_chain, boot_id, peer, member)
            address = server.start(servicer)
            assembly.engine.exchange.send = lambda outbound: server.call_soon(servicer.send_out, outbound)
        except BaseException:
            server.stop()
            raise
        loop.commands.exchange(lambda exchange: exchange.compute_for_others(config.role.prefills))
        if team is not None:
            team.detector.on_loss(loop.abandon)
        if transfers is not None:
            transfers.on_failure = self.fail
        if self._watch is not None:
            self._watch.start()
        report("ready", 1.0)
        self._facts = start_facts(
            config,
            boot_id,
            assembly.model,
            assembly.size,
            address=address,
            max_model_len=assembly.max_model_len,
            max_num_seqs=assembly.limits.max_num_seqs,
            max_num_batched_tokens=assembly.limits.max_num_batched_tokens,
            team_notes=team.notes if team is not None else (),
            notes=assembly.notes,
        )

    def await_ready(self) -> ReplicaStarted:
        """Facts of the start."""
        return self._facts

    def set_role(self, role: Role) -> None:
        """Changes the role for routers. From any thread."""
        self._description.set_role(role.number)
        self.loop.commands.exchange(lambda exchange: exchange.compute_for_others(role.prefills))

    def fail(self, sentence: str) -> None:
        """A step hangs, or the device is defective: the replica ends at once, and its requests continue elsewhere."""
        if self._team is not None:
            self._team.detector.fail(sentence)
        self.loop.abandon(RunnerBrokenError(sentence))
        if self._transfers is not None:
            self._transfers.stop()  # last: a read from a device that hangs may not end

    def stop(self) -> None:
        """Ends the loop, the other ranks, then the server once the last frames are sent. Idempotent."""
        lost = self.loop.failure is not None
        if self._watch is not None:
            self._watch.stop()
        self.loop.stop(LOST_STOP_SECONDS if lost else STOP_SECONDS)
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.stop()
        if self._transfers is not None:
            self._transfers.stop()
        if self._team is not None:
            self._team.close()
        self._server.stop()
