"""One build of a replica: the production engine over simulated ranks, and the turns of its loop."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import msgspec

from headrace_proto import replica_pb2 as pb
from headrace_proto.block_hash import BlockHasher, derive_key
from headrace_worker.assembly.command_queue import CommandQueue
from headrace_worker.core.engine import Engine
from headrace_worker.core.kv.manager import KVManager, ModelScope
from headrace_worker.core.kv.states import SLOTS_PER_ROW
from headrace_worker.core.request import Finish, Output
from headrace_worker.core.scheduler import Scheduler, SchedulerLimits
from headrace_worker.core.transfer.exchange import Outbound, TransferExchange
from headrace_worker.core.transfer.orders import TransferReport
from headrace_worker.core.transfer.shards import KvShards
from headrace_worker.core.transfer.slots import Slots
from headrace_worker.server.convert import to_load, to_request
from headrace_worker.server.transfer_peer import TransferPeer
from support.simulation.invariants import Invariants
from support.simulation.ranks import SimRanks
from support.simulation.sim_link import RouterStream
from support.simulation.sim_model import MAX_MODEL_LEN, VOCABULARY, Model
from support.simulation.transfer_stream import TransferStream
from support.simulation.world import Fifo, InvariantViolation, World

if TYPE_CHECKING:
    from support.simulation.sim_cluster import Cluster
    from support.simulation.sim_controller import HealthStream

IDLE_TICK = 0.25
KEY = derive_key(b"simulation")


@dataclass(frozen=True, slots=True)
class Shape:
    """The configuration of a replica; the same in all its builds."""

    name: str
    tp: int
    pp: int
    blocks: int
    rows: int
    budget: int
    depth: int
    step_seconds: float
    revision: str = "r"
    host_slots: int = 0  # for evicted blocks
    places: int = 0  # for them in the ranks' files
    host_states: int = 0  # for evicted snapshots


class SimReplica:
    """Owns its events: they are lost when it is killed, and delayed while it is frozen."""

    def __init__(self, cluster: "Cluster", shape: Shape, model: Model, generation: int) -> None:
        self.alive = True
        self.frozen_until = 0.0
        self.frozen_at = 0.0  # beginning of the last time that it was frozen
        self.refuses_until = 0.0  # as if its queue were full
        self.stopped = False
        self._spent = 0.0  # seconds of the current turn
        self.draining = False
        self.slowdown = 1.0  # of its steps
        self.cluster = cluster
        self.world: World = cluster.world
        self.shape = shape
        self.name = self.address = shape.name
        self.shards: KvShards = model.shards(shape.tp, shape.pp)
        ranks = [
            msgspec.structs.replace(rank, agent=f"{shape.name}/{generation}/{number}".encode())
            for number, rank in enumerate(self.shards.ranks)
        ]
        self.shards = msgspec.structs.replace(self.shards, ranks=tuple(ranks))
        self.identity = pb.ReplicaIdentity(
            replica_id=shape.name,
            boot_id=f"{shape.name}/{generation}".encode(),
            model="m",
            revision=shape.revision,
            dtype="float32",
            generation=generation,
        )
        layout = model.layout
        scope = ModelScope("m", "r", "float32", "float32")
        snapshots = 1 if shape.host_states else shape.rows  # beside the rows' own slots
        slots = 1 + SLOTS_PER_ROW * shape.rows + snapshots if model.states else 1
        self.kv = KVManager(layout, shape.blocks, BlockHasher(KEY), scope, slots, shape.rows)
        limits = SchedulerLimits(shape.rows, shape.budget, max_waiting=64, batches=shape.pp)
        self.scheduler = Scheduler(limits, self.kv, self.clock)
        disks = [cluster.disks.setdefault((shape.name, number), {}) for number in range(len(ranks))]
        self.ranks = SimRanks(self.world, self, model, self.shards, cluster.data, self._reported, self._spend, disks)
        self.engine = Engine(
            self.scheduler,
            self.ranks,
            self.clock,
            max(shape.depth, shape.pp - 1),
            len(ranks),
            shape.host_slots,
            shape.host_states,
            Slots(shape.places, [(place, content) for place, (content, _) in disks[0].items()]),
        )
        if shape.host_slots:
            self.engine.exchange.send = self._send_early
        self.peer = TransferPeer(lambda: self.identity, self.shards, CommandQueue())
        self.invariants = Invariants(self)
        self.sources: dict[str, TransferStream] = {}
        self.targets: dict[str, TransferStream] = {}
        self.orphans: dict[tuple[str, int], float] = {}  # grants without a fetch, with the time of their first check
        self.steps = 0
        self.health_streams: list[HealthStream] = []
        self._streams: list[RouterStream] = []
        self._owners: dict[bytes, RouterStream] = {}
        self._ended: set[bytes] = set()
        self._commands: deque[Callable[[], Output | None]] = deque()
        self._due: float | None = None
        self._turns = 0
        self._busy_until = self._reported_at = 0.0
        self._report_queues = [Fifo(self.world, self, self._report_received) for _ in self.shards.ranks]
        self._names = 0

    @property
    def unhealthy(self) -> bool:
        """Whether it is dead, or was frozen in the last second."""
        return not self.alive or self.stopped or self.frozen_until > self.world.now - 1.0

    def clock(self) -> float:
        return self.world.now + self._spent

    def load(self) -> pb.Load:
        """As the server reports it after the last turn."""
        return to_load(self.engine.load(), self.steps, self.draining)

    def health(self) -> pb.ReplicaHealth:
        """As the server reports it to the controller."""
        state = pb.REPLICA_STATE_DRAINING if self.draining else pb.REPLICA_STATE_READY
        routers = len(self._streams)
        return pb.ReplicaHealth(identity=self.identity, state=state, step=self.steps, load=self.load(), routers=routers)

    # -- interface --------------------------------------------------------------------------------------------

    def command(self, action: Callable[[TransferExchange], None]) -> None:
        """Queued for the loop's next turn."""
        self._enqueue(lambda: action(self.engine.exchange))

    def connected(self, stream: RouterStream) -> None:
        """A router's stream was opened; while there is one, each turn sends a frame, also idle turns at each tick."""
        self._streams.append(stream)
        self._wake(0.0)

    def submitted(self, stream: RouterStream, submit: pb.Submit) -> None:
        request = to_request(
            submit,
            now=self.clock(),
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCABULARY,
            eos_token_ids=(),
            start_chain=self.kv.start_chain,
        )
        self._owners[submit.attempt_id] = stream
        stream.attempts.add(submit.attempt_id)

        def accept() -> Output | None:
            stream.accepted += 1
            if self.draining:
                return Output(request.attempt_id, 0, [], finish=Finish.REFUSED, error="draining")
            if self.world.now < self.refuses_until:
                return Output(request.attempt_id, 0, [], finish=Finish.REFUSED, error="full")
            return self.engine.submit(request)

        self._enqueue(accept)

    def cancel(self, attempt_id: bytes) -> None:
        self._enqueue(lambda: self.engine.cancel(attempt_id))

    def router_disconnected(self, stream: RouterStream) -> None:
        self._streams.remove(stream)
        for attempt_id in sorted(stream.attempts):
            self._owners.pop(attempt_id, None)
            self.cancel(attempt_id)
        stream.attempts.clear()

    def source_disconnected(self, stream: TransferStream) -> None:
        """As the target: a stream ended that this replica did not close."""
        if self.sources.get(stream.address) is stream:
            del self.sources[stream.address]
        self.command(lambda exchange: exchange.fetcher.peer_lost(stream.address))

    def target_disconnected(self, stream: TransferStream) -> None:
        """As the source: a stream ended."""
        self.targets.pop(stream.name, None)
        self.command(lambda exchange: exchange.granter.peer_lost(stream.name))

    def name_of(self, stream: TransferStream) -> str:
        self._names += 1
        name = f"{stream.target.name}#{self._names}"
        self.targets[name] = stream
        return name

    def stop(self) -> None:
        """Cancels all attempts: each may continue on another replica."""
        self.stopped = True
        outputs = [
            Output(attempt_id, 0, [], finish=Finish.CANCELLED, error="the replica is stopping")
            for attempt_id in self._owners
        ]
        self._deliver(outputs)

    # -- turns -------------------------------------------------------------------------------------------------

    def _enqueue(self, command: Callable[[], Output | None]) -> None:
        self._commands.append(command)
        self._wake(0.0)

    def _wake(self, delay: float) -> None:
        due = max(self.world.now + delay, self._busy_until)
        if self._due is not None and self._due <= due:
            return
        self._due = due
        self._turns += 1
        number = self._turns
        self.world.at(due - self.world.now, lambda: self._turn(number), self)

    def _turn(self, number: int) -> None:
        if number != self._turns or self.stopped:
            return
        self._due, self._spent = None, 0.0
        engine, outputs = self.engine, []
        while self._commands:
            output = self._commands.popleft()()
            if output is not None:
                outputs.append(output)
            self.invariants.always()
        if engine.has_work or engine.exchange.busy:
            began = self.world.now
            outputs += engine.step()
            self.invariants.always()
            self.invariants.leases(began)
        for output in outputs:
            self._check_output(output)
        outbound = engine.exchange.take_outbound()
        spent, self._spent = self._spent, 0.0
        self._busy_until = self.world.now + spent
        self.invariants.commits(outbound)
        self.steps += 1
        if outputs or outbound or self._streams:  # reports reach the server in order
            self._reported_at = max(self._reported_at, self._busy_until + self.world.delay() / 8)
            self.world.at(self._reported_at - self.world.now, lambda: self._report(outputs, outbound), self)
        engine.take_cache_changes()
        self.cluster.watch(self)
        if engine.has_work:
            self._wake(spent + 0.001)
        elif engine.exchange.busy or (self._streams and self.cluster.busy):
            self._wake(spent + IDLE_TICK)

    def _report(self, outputs: list[Output], outbound: Outbound) -> None:
        self._deliver(outputs)
        self._send_out(outbound)

    def _send_early(self, outbound: Outbound) -> None:
        """Before the step that the turn computes."""
        self.invariants.commits(outbound)
        self._reported_at = max(self._reported_at, self.world.now + self.world.delay() / 8)
        self.world.at(self._reported_at - self.world.now, lambda: self._send_out(outbound), self)

    def _spend(self) -> None:
        self._spent += self.slowdown * self.shape.step_seconds * (0.5 + self.world.random.random())

    def _check_output(self, output: Output) -> None:
        if output.attempt_id in self._ended and output.attempt_id in self._owners:
            raise InvariantViolation("an attempt that has ended produces output")
        if output.finish is not None:
            self._ended.add(output.attempt_id)

    def _deliver(self, outputs: list[Output]) -> None:
        batches: dict[int, tuple[RouterStream, list[Output]]] = {}
        for output in outputs:
            stream = self._owners.get(output.attempt_id)
            if stream is not None:
                batches.setdefault(id(stream), (stream, []))[1].append(output)
                if output.finish is not None:
                    del self._owners[output.attempt_id]
                    stream.attempts.discard(output.attempt_id)
        for stream in list(self._streams):
            stream.put(batches[id(stream)][1] if id(stream) in batches else [])

    def _send_out(self, outbound: Outbound) -> None:
        for address, message in outbound.to_sources:
            self.world.log("{} to source {}: {}", self.name, address, message)
            if address not in self.sources:
                self.sources[address] = TransferStream(self, address)
                self.cluster.streams.append(self.sources[address])
            self.sources[address].send_to_source(message)
        for name, answer in outbound.to_targets:
            self.world.log("{} to target {}: {}", self.name, name, answer)
            if name in self.targets:
                self.targets[name].send_to_target(answer)
        for peer in outbound.disconnect:
            if peer in self.sources:
                self.sources.pop(peer).close()

    def _reported(self, report: TransferReport) -> None:
        self.world.log("{} report {}", self.name, report)
        self._report_queues[report.rank].put(report)

    def _report_received(self, report: object) -> None:
        self.command(lambda exchange: exchange.handle_report(cast(TransferReport, report)))
