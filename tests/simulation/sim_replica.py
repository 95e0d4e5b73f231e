"""One life of a replica: the production engine over pretended ranks, and the turns of its loop."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from model import MAX_MODEL_LEN, VOCABULARY, Model
from ranks import SimRanks
from router_stream import RouterStream
from transfer_stream import TransferStream
from world import BrokenPromise, Fifo, World

from headrace_proto import replica_pb2 as pb
from headrace_proto.block_hash import BlockHasher, derive_key
from headrace_worker.engine import Engine
from headrace_worker.kv.manager import KVManager, ModelScope
from headrace_worker.loop import EngineLoop
from headrace_worker.request import Finish, Output
from headrace_worker.scheduler import Scheduler, SchedulerLimits
from headrace_worker.server.convert import to_request
from headrace_worker.server.pairs import PairDesk
from headrace_worker.transfer.exchange import Exchange, Outbound
from headrace_worker.transfer.orders import ClosePair, Drop, OpenPair, Receive, Report
from headrace_worker.transfer.shards import KvShards

if TYPE_CHECKING:
    from sim_cluster import Cluster
    from wires import PairWire

IDLE_TICK = 0.25
KEY = derive_key(b"simulation")


@dataclass(frozen=True, slots=True)
class Shape:
    """What a replica is made of; the same in all its lives."""

    name: str
    tp: int
    pp: int
    blocks: int
    rows: int
    budget: int
    depth: int
    step_seconds: float


class SimReplica:
    """Owns its events: they are lost when it is killed, and wait while it stands still."""

    def __init__(self, cluster: "Cluster", shape: Shape, model: Model, life: int) -> None:
        self.alive = True
        self.frozen_until = 0.0
        self.stopped = False
        self._spent = 0.0  # of the turn that goes on
        self.draining = False
        self.cluster = cluster
        self.world: World = cluster.world
        self.shape = shape
        self.name = shape.name
        self.shards: KvShards = model.shards(shape.tp, shape.pp)
        self.identity = pb.ReplicaIdentity(
            replica_id=shape.name, boot_id=f"{shape.name}/{life}".encode(), model="m", revision="r", dtype="float32"
        )
        layout = model.layout
        self.kv = KVManager(layout, shape.blocks, BlockHasher(KEY), ModelScope("m", "r", "float32", "float32"))
        limits = SchedulerLimits(shape.rows, shape.budget, max_waiting=64, batches=shape.pp)
        self.scheduler = Scheduler(limits, self.kv, self.clock)
        ranks = len(self.shards.ranks)
        self.ranks = SimRanks(self.world, self, model, self.shards, self._wire, self._reported, self._spend)
        self.engine = Engine(self.scheduler, self.ranks, self.clock, max(shape.depth, shape.pp - 1), ranks)
        self.desk = PairDesk(
            lambda: self.identity, self.shards, cast(EngineLoop, None), "127.0.0.1", lambda number, host: None
        )
        self.sources: dict[str, TransferStream] = {}
        self.targets: dict[str, TransferStream] = {}
        self.orphans: dict[tuple[str, int], float] = {}  # grants without a fetch, and since when
        self._owners: dict[bytes, RouterStream] = {}
        self._ended: set[bytes] = set()
        self._commands: deque[Callable[[], Output | None]] = deque()
        self._due: float | None = None
        self._turns = 0
        self._busy_until = self._reported_at = 0.0
        self._notes = [Fifo(self.world, self, self._noted) for _ in self.shards.ranks]
        self._names = 0

    @property
    def troubled(self) -> bool:
        """Whether it is dead, or stood still in the last second."""
        return not self.alive or self.stopped or self.frozen_until > self.world.now - 1.0

    def clock(self) -> float:
        return self.world.now + self._spent

    # -- from outside -----------------------------------------------------------------------------------------

    def command(self, tell: Callable[[Exchange], None]) -> None:
        """Left for the loop's next turn."""
        self._leave(lambda: tell(self.engine.exchange))

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
            if self.draining:
                return Output(request.attempt_id, 0, [], finish=Finish.REFUSED, error="draining")
            return self.engine.submit(request)

        self._leave(accept)

    def cancel(self, attempt_id: bytes) -> None:
        self._leave(lambda: self.engine.cancel(attempt_id))

    def router_gone(self, stream: RouterStream) -> None:
        for attempt_id in sorted(stream.attempts):
            self._owners.pop(attempt_id, None)
            self.cancel(attempt_id)
        stream.attempts.clear()

    def source_gone(self, stream: TransferStream) -> None:
        """As the target: a stream ended that was not hung up."""
        if self.sources.get(stream.address) is stream:
            del self.sources[stream.address]
        self.command(lambda exchange: exchange.source_lost(stream.address))

    def target_gone(self, stream: TransferStream) -> None:
        """As the source."""
        self.targets.pop(stream.name, None)
        self.command(lambda exchange: exchange.granter.lost(stream.name))

    def name_of(self, stream: TransferStream) -> str:
        self._names += 1
        name = f"{stream.target.name}#{self._names}"
        self.targets[name] = stream
        return name

    def stop(self) -> None:
        """Gives up what is left: each attempt may go on elsewhere."""
        self.stopped = True
        outputs = [
            Output(attempt_id, 0, [], finish=Finish.CANCELLED, error="the replica is stopping")
            for attempt_id in self._owners
        ]
        self._deliver(outputs)

    # -- turns -------------------------------------------------------------------------------------------------

    def _leave(self, command: Callable[[], Output | None]) -> None:
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
            self.check()
        if engine.has_work or engine.exchange.busy:
            outputs += engine.step()
            self.check()
        for output in outputs:
            self._look_at(output)
        outbound = engine.exchange.take_outbound()
        spent, self._spent = self._spent, 0.0
        self._busy_until = self.world.now + spent
        if outputs or outbound:  # reports reach the server in order
            self._reported_at = max(self._reported_at, self._busy_until + self.world.delay() / 8)
            self.world.at(self._reported_at - self.world.now, lambda: self._report(outputs, outbound), self)
        engine.take_cache_changes()
        self.cluster.watch(self)
        if engine.has_work:
            self._wake(spent + 0.001)
        elif engine.exchange.busy:
            self._wake(spent + IDLE_TICK)

    def _report(self, outputs: list[Output], outbound: Outbound) -> None:
        self._deliver(outputs)
        self._send_out(outbound)

    def _spend(self) -> None:
        self._spent += self.shape.step_seconds * (0.5 + self.world.random.random())

    def _look_at(self, output: Output) -> None:
        if output.attempt_id in self._ended and output.attempt_id in self._owners:
            raise BrokenPromise("an attempt that has ended speaks")
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
        for stream, mine in batches.values():
            stream.put(mine)

    def _send_out(self, outbound: Outbound) -> None:
        for address, message in outbound.to_sources:
            if self.world.tracing:
                self.world.log(f"{self.name} to source {address}: {message}")
            if address not in self.sources:
                self.sources[address] = TransferStream(self, address)
                self.cluster.streams.append(self.sources[address])
            self.sources[address].say(message)
        for name, answer in outbound.to_targets:
            if self.world.tracing:
                self.world.log(f"{self.name} to target {name}: {answer}")
            if name in self.targets:
                self.targets[name].answer(answer)
        for peer in outbound.hang_up:
            if peer in self.sources:
                self.sources.pop(peer).hang_up()
            if peer in self.targets:
                self.targets[peer].turn_out()

    def _wire(self, order: OpenPair) -> "PairWire":
        return self.cluster.wire(order)

    def _reported(self, report: Report) -> None:
        if self.world.tracing:
            self.world.log(f"{self.name} report {report}")
        self._notes[report.rank].put(report)

    def _noted(self, report: object) -> None:
        self.command(lambda exchange: exchange.reported(cast(Report, report)))

    # -- what must hold ----------------------------------------------------------------------------------------

    def check(self) -> None:
        """After every command and every step. Raises."""
        exchange, pool = self.engine.exchange, self.kv.pool
        self.scheduler.check(exchange.held())
        for exposure in self.ranks.exposures.values():
            order = exposure.order
            if isinstance(order, Receive):
                loose = exposure.blocks - set(exchange.fetcher.held()) - pool._quarantined
                if loose:
                    raise BrokenPromise(f"blocks {loose} may still be received, but are neither held nor quarantined")
            else:
                self._check_send(order.pair, order.fetch, exposure.blocks)

    def _check_send(self, pair: int, fetch: int, blocks: set[int]) -> None:
        """What may still be read is held by its grant, or its couriers are told to leave it before anything else."""
        granter = self.engine.exchange.granter
        told = ClosePair(pair) in granter.orders or Drop(pair, fetch) in granter.orders
        peers = [peer for peer, known in granter._peers.items() if known.pair == pair]
        grant = granter._grants.get((peers[0], fetch)) if peers else None
        if told:
            return
        if grant is None:
            raise BrokenPromise(f"blocks {blocks} of fetch {fetch} may still be sent, but nothing holds them")
        request = grant.request
        if request is not None and (request.finish is not None or request.table is not grant.table):
            return  # given up: the next plan says so
        table = grant.table
        if table is None or not blocks <= set(table.held()):
            raise BrokenPromise(f"blocks {blocks} of fetch {fetch} may still be sent, but its grant does not hold them")

    def check_idle(self) -> None:
        """When nothing is left to do. Raises."""
        exchange, pool = self.engine.exchange, self.kv.pool
        left = {
            "used blocks": pool.used,
            "quarantined blocks": pool.quarantined,
            "fetches": len(exchange.fetcher),
            "grants": len(exchange.granter),
            "orders": len(exchange.fetcher.orders) + len(exchange.granter.orders),
            "requests": len(self.engine._requests),
            "queued": len(self.scheduler.waiting),
            "running": len(self.scheduler.running),
            "exposed chunks": len(self.ranks.exposures),
        }
        known = {peer.pair for peer in exchange.fetcher._peers.values()}
        known |= {peer.pair for peer in exchange.granter._peers.values()}
        for courier in self.ranks.couriers:
            left["pairs of nobody"] = len(set(courier.carriers) - known)
            left["live fetches of couriers"] = sum(len(carrier.live) for carrier in courier.carriers.values())
        if any(left.values()):
            raise BrokenPromise(f"{self.name} keeps { ({name: count for name, count in left.items() if count}) }")
