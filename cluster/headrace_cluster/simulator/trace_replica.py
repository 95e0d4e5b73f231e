"""A replica: the production engine in virtual time. Its steps take the time of the latency model."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from random import Random

from headrace_cluster.simulator.latency_runner import LatencyRunner
from headrace_cluster.simulator.load_reports import IDLE_SECONDS, EndedStep, ReplicaReports, RouterLink
from headrace_cluster.simulator.replica_shape import KEY, VOCABULARY, ReplicaShape
from headrace_cluster.simulator.stretch import ReportedStretch, Stretch, StretchAttempt, StretchStep, decode_steps
from headrace_cluster.simulator.transfers import SimulatedTransfers
from headrace_cluster.simulator.virtual_time import Event, VirtualTime
from headrace_proto import replica_pb2 as pb
from headrace_proto.block_hash import BlockHasher
from headrace_proto.replica_pb2 import CacheEvent, CacheFrame
from headrace_worker.core.engine import Engine
from headrace_worker.core.kv.blocks import CacheChange
from headrace_worker.core.kv.manager import KVManager
from headrace_worker.core.request import Finish, Output
from headrace_worker.core.scheduler import Scheduler, SchedulerLimits
from headrace_worker.server.convert import fill_delta, to_request

INTERVAL_SECONDS = 0.1  # between two increments
Watcher = Callable[[CacheFrame], None]


class CacheFeed:
    """The cache events of a replica, as production's CacheEventHub sends them.

    Each watcher gets a snapshot, then the net changes at an interval.
    """

    def __init__(self, time: VirtualTime, boot_id: bytes, network: float) -> None:
        """network: seconds until a frame arrives."""
        self._time = time
        self._boot_id = boot_id
        self._network = network
        self._sequence = 0
        self._held: dict[bytes, None] = {}
        self._net: dict[bytes, bool] = {}
        self._watchers: list[Watcher] = []
        self._sending = False

    def add(self, changes: Iterable[CacheChange]) -> None:
        """Those of a step."""
        for _, digest, stored, _ in changes:  # simulated replicas have no host memory for evicted blocks
            if stored:
                self._held[digest] = None
            else:
                self._held.pop(digest, None)
            if self._watchers:
                self._net[digest] = stored
        if self._net and not self._sending:
            self._sending = True
            self._time.after(INTERVAL_SECONDS, self._send)

    def watch(self, watcher: Watcher) -> None:
        """Changes that no increment has had yet are in the snapshot and in the next increment, with equal states."""
        event = CacheEvent(group=0, stored=list(self._held), cleared=True)
        watcher(
            CacheFrame(boot_id=self._boot_id, sequence=self._sequence, snapshot=True, snapshot_end=True, events=[event])
        )
        self._watchers.append(watcher)

    def unwatch(self, watcher: Watcher) -> None:
        if watcher in self._watchers:
            self._watchers.remove(watcher)

    def _send(self) -> None:
        self._sending = False
        net, self._net = self._net, {}
        self._sequence += 1
        event = CacheEvent(
            group=0,
            stored=[digest for digest, stored in net.items() if stored],
            removed=[digest for digest, stored in net.items() if not stored],
        )
        frame = CacheFrame(boot_id=self._boot_id, sequence=self._sequence, events=[event])
        for watcher in self._watchers:
            self._time.after(self._network, lambda watcher=watcher: watcher(frame))  # type: ignore[misc]


class TraceReplica:
    """One process. Messages reach it and leave it after the network's delay."""

    def __init__(
        self,
        time: VirtualTime,
        name: str,
        shape: ReplicaShape,
        role: "pb.Role",
        random: Random,
        *,
        noise: float,
        slowdown: float,
        network: float,
        peer: Callable[[str], "TraceReplica | None"],
        generation: int = 1,
        skip: bool = True,
    ) -> None:
        """network: seconds of a message. peer: the replica at an address. skip: see `stretch.py`."""
        self.alive = True
        self.name = name
        self.draining = False
        self.facts = shape.facts(name, f"{name}/{generation}".encode().ljust(16, b"."), generation, role)
        self.steps = 0
        self.busy_seconds = 0.0
        self._time = time
        self.shape = shape
        self._network = network
        self._skip = skip
        self._stretch: Stretch | None = None
        self._reported: dict[RouterLink, ReportedStretch] = {}  # what each router receives of `_stretch`
        self._accepted = 0  # requests, by the engine
        self._idle_steps = 0  # after which nothing ran
        self._spent = 0.0  # seconds of the current turn
        self._busy_until = 0.0
        self._turn: Event | None = None
        self._turn_at = 0.0
        self._commands: deque[Callable[[], Output | None]] = deque()
        self._owners: dict[bytes, RouterLink] = {}
        kv = KVManager(shape.layout, shape.kv_blocks + 1, BlockHasher(KEY), shape.scope)
        latency = shape.latency
        limits = SchedulerLimits(latency.max_num_seqs, latency.max_num_batched_tokens, shape.max_waiting)
        self._kv = kv
        self.transfers = SimulatedTransfers(time, self, shape, network, peer)
        self.runner = LatencyRunner(latency, random, noise, slowdown, self._spend, self.transfers.execute)
        self.engine = Engine(Scheduler(limits, kv, self.clock), self.runner, self.clock)
        self.engine.exchange.compute_for_others(role != pb.ROLE_DECODE)
        self._reports = ReplicaReports(time, EndedStep(0, self.engine.load()), self.advance)
        self.cache = CacheFeed(time, self.facts.identity.boot_id, network)

    def clock(self) -> float:
        """The engine's time, within a turn, too."""
        return self._time.now + self._spent

    # What reaches it: called at the time of the message's arrival

    def connect(self, link: RouterLink) -> pb.ReplicaFrame:
        """Returns its first frame."""
        self.interrupt()
        hello = pb.ReplicaFrame(hello=self.facts.identity, load=self._reports.connect(link))
        self._wake(0.0)
        return hello

    def disconnect(self, link: RouterLink) -> None:
        """All attempts of the router end."""
        self.interrupt()
        self.cache.unwatch(link.receive_cache)
        self._reports.disconnect(link)
        for attempt_id in [attempt_id for attempt_id, owner in self._owners.items() if owner is link]:
            del self._owners[attempt_id]
            self._command(lambda attempt_id=attempt_id: self.engine.cancel(attempt_id))  # type: ignore[misc]

    def receive(self, link: RouterLink, frame: pb.RouterFrame) -> None:
        if not self.alive or link not in self._reports:
            return
        self.interrupt()
        for cancel in frame.cancels:
            self._command(lambda attempt_id=cancel.attempt_id: self.engine.cancel(attempt_id))  # type: ignore[misc]
        self._reports.received(link, frame.submits)
        for submit in frame.submits:
            self._owners[submit.attempt_id] = link
            self._command(lambda submit=submit: self._accept(link, submit))  # type: ignore[misc]

    def command(self, action: Callable[[], None]) -> None:
        """Something for the engine, before its next step."""
        self._command(action)

    def kill(self) -> None:
        """Its process ends; routers see that their streams have ended, peers that theirs have."""
        self.interrupt()
        self.alive = False
        if self._turn is not None:
            self._turn.cancel()
        for link in self._reports.links:
            self._time.after(self._network, link.disconnected)
        self.transfers.end()

    def drain(self) -> None:
        """It refuses new requests."""
        self.interrupt()
        self.draining = True

    @property
    def idle(self) -> bool:
        """Whether it has no requests, and computes nothing for others."""
        return not (self.engine.has_work or self.engine.exchange.busy or self._commands)

    def slow_down(self, factor: float) -> None:
        """From its next step on."""
        self.interrupt()
        self.runner.slowdown = factor

    # Steps that only decode

    def advance(self) -> None:
        """Runs the steps of a stretch that have begun by now, and reports those that have ended."""
        stretch, now = self._stretch, self._time.now
        while stretch is not None and stretch.next_start <= now:
            if (step := stretch.end_step()) is not None:
                self._reports.stretch_step_ended(self._report_of(step), step, self._reported, stretch.done)
            if stretch.complete:
                return
            with self._time.as_of(stretch.next_start):
                speeds = self.engine.exchange.source_speeds()
            self.steps += 1
            self.busy_seconds += stretch.begin_step(self.steps, speeds)

    def interrupt(self) -> None:
        """Something reaches the replica: the step that runs is the stretch's last one, and reported as any other."""
        stretch = self._stretch
        if stretch is None:
            return
        self.advance()
        end = self._busy_until = stretch.next_start
        if (step := stretch.end_step()) is not None:
            last = {link: reported.last_frame(stretch.done) for link, reported in self._reported.items()}
            frames = {link: frame for link, frame in last.items() if frame is not None}
            self._report_at(end, self._report_of(step), frames)
        self._end_stretch(stretch)
        assert self._turn is not None
        self._turn.cancel()
        self._turn, self._turn_at = self._time.at(end, self._run_turn), end

    def _begin_stretch(self) -> bool:
        """Whether the next steps only decode."""
        count = decode_steps(self.engine)
        if not count:
            return False
        stretch = self._stretch = Stretch(self.engine, self.runner, self.engine.load(), self._time.now, count)
        attempts: dict[RouterLink, list[StretchAttempt]] = {link: [] for link in self._reports.links}
        for attempt in stretch.attempts:
            owner = self._owners.get(attempt.attempt_id)
            if owner is not None:
                attempts[owner].append(attempt)
        self._reported = {
            link: ReportedStretch(own, self._reports.stretch_frame(link)) for link, own in attempts.items()
        }
        for link, reported in self._reported.items():
            link.add_stretch(reported)
        self._turn, self._turn_at = self._time.at(stretch.end, self._complete_stretch), stretch.end
        self.advance()
        return True

    def _report_of(self, step: StretchStep) -> EndedStep:
        return EndedStep(step.number, step.load, self.draining, self._accepted, self._idle_steps)

    def _complete_stretch(self) -> None:
        assert self._stretch is not None
        self.advance()
        self._end_stretch(self._stretch)
        self._run_turn()

    def _end_stretch(self, stretch: Stretch) -> None:
        stretch.finish()
        for reported in self._reported.values():
            reported.ended = True
        self._stretch, self._reported = None, {}

    # Turns

    def _accept(self, link: RouterLink, submit: pb.Submit) -> Output | None:
        self._accepted += 1
        if self.draining:
            return Output(submit.attempt_id, 0, [], finish=Finish.REFUSED, error="draining")
        request = to_request(
            submit,
            now=self.clock(),
            max_model_len=self.shape.max_model_len,
            vocab_size=VOCABULARY,
            eos_token_ids=(),
            start_chain=self._kv.start_chain,
        )
        return self.engine.submit(request)

    def _command(self, command: Callable[[], Output | None]) -> None:
        self.interrupt()
        self._commands.append(command)
        self._wake(0.0)

    def _wake(self, seconds: float) -> None:
        due = max(self._time.now + seconds, self._busy_until)
        if self._turn is not None:
            if self._turn_at <= due:
                return
            self._turn.cancel()
        self._turn, self._turn_at = self._time.at(due, self._run_turn), due

    def _spend(self, seconds: float) -> None:
        self._spent += seconds
        self.busy_seconds += seconds

    def _run_turn(self) -> None:
        self._turn, self._spent = None, 0.0
        if self._skip and not self._commands and self._begin_stretch():
            return
        engine = self.engine
        outputs: list[Output] = []
        while self._commands:
            output = self._commands.popleft()()
            if output is not None:
                outputs.append(output)
        if engine.has_work or engine.exchange.busy:
            outputs += engine.step()
        spent, self._spent = self._spent, 0.0
        self._busy_until = end = self._time.now + spent
        self.steps += 1
        self.cache.add(engine.take_cache_changes())
        self.transfers.send(engine.exchange.take_outbound(), end)
        self._report(outputs, end)
        if engine.has_work:
            self._wake(spent if spent else 0.001)
        elif engine.exchange.busy:
            self._wake(spent + IDLE_SECONDS / 10)
        elif len(self._reports):
            self._wake(spent + IDLE_SECONDS)

    def _report(self, outputs: list[Output], end: float) -> None:
        """The turn's step, whose results routers get at its end."""
        frames: dict[RouterLink, pb.ReplicaFrame] = {}
        for output in outputs:
            owner = self._owners.get(output.attempt_id)
            if owner is None:
                continue
            frame = frames.get(owner)
            if frame is None:
                frame = frames[owner] = pb.ReplicaFrame()
            fill_delta(frame.deltas.add(), output)
            if output.finish is not None:
                del self._owners[output.attempt_id]
        load = self.engine.load()
        self._idle_steps += load.running == 0
        self._report_at(end, EndedStep(self.steps, load, self.draining, self._accepted, self._idle_steps), frames)

    def _report_at(self, end: float, report: EndedStep, frames: Mapping[RouterLink, pb.ReplicaFrame]) -> None:
        if end == self._time.now:
            self._reports.ended(report, frames)
        else:
            self._time.at(end, lambda: self._reports.ended(report, frames))
