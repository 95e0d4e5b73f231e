"""Steps in which nothing but decoding happens: each costs a few operations, however many requests run.

Exact: a run has the same results without it. In a stretch every running request gets one token in each step, and the
KV cache does not change; it ends before a step in which a request ends, a block is begun or published, and whenever
anything reaches the replica. The lengths of its steps are drawn when it begins, since its end is an event. The rest,
such as the fit of the step model, is done for all steps that have begun when the replica is advanced: before a router
decides, and before anything reaches the replica. The tokens of requests and those of routers are added at the end.
"""

from dataclasses import dataclass, field, replace

from headrace_cluster.simulator.latency_runner import LatencyRunner
from headrace_cluster.simulator.replica_shape import OUTPUT_TOKEN
from headrace_proto import replica_pb2 as pb
from headrace_worker.core.engine import Engine, LoadSnapshot
from headrace_worker.core.transfer.fetching import SourceSpeed
from headrace_worker.server.convert import to_source_speeds, to_step_model

LEAST_STEPS = 3  # steps of a stretch
MOST_STEPS = 4096


@dataclass(frozen=True, slots=True)
class StretchStep:
    """What a router receives of a step, besides the tokens."""

    number: int  # number of the step among the replica's steps
    end: float
    load: LoadSnapshot
    generated: int  # tokens of the replica so far


@dataclass(frozen=True, slots=True)
class StretchAttempt:
    """A running request at the beginning of a stretch."""

    attempt_id: bytes
    first_index: int  # index of the request's next token, among the tokens of its answer
    computed: int  # positions
    preemptions: int

    def tokens(self, first: int, stop: int) -> list[int]:
        """Those of the stretch's steps [first, stop)."""
        begin = OUTPUT_TOKEN + self.computed + 1
        return list(range(begin + first, begin + stop))


@dataclass(slots=True)
class ReportedStretch:
    """A stretch as one router receives it."""

    attempts: list[StretchAttempt]  # attempts of this router
    frame: pb.ReplicaFrame  # frame of the newest step that the router has applied
    steps: list[tuple[StretchStep, int]] = field(default_factory=list)  # with the number of steps until then
    applied: int = 0  # entries of `steps`
    delivered: int = 0  # steps whose tokens the router has
    ended: bool = False

    def fill(self, step: StretchStep) -> pb.ReplicaFrame:
        """The frame of a step, without tokens."""
        frame, load = self.frame, self.frame.load
        frame.step = load.counters.steps = step.number
        load.counters.generation_tokens = step.generated
        load.predicted_step_ms = step.load.predicted_step * 1e3
        load.step_model.CopyFrom(to_step_model(step.load.cost))
        if load.sources or step.load.source_speeds:
            del load.sources[:]
            load.sources.extend(to_source_speeds(step.load.source_speeds, step.load.block_size))
        return frame

    def last_frame(self, count: int) -> pb.ReplicaFrame | None:
        """Tokens of the last one of so many steps, as of a step outside of stretches; None without attempts."""
        if not self.attempts:
            return None
        deltas = [
            pb.Delta(
                attempt_id=entry.attempt_id,
                first_index=entry.first_index + count - 1,
                token_ids=entry.tokens(count - 1, count),
                preemptions=entry.preemptions,
            )
            for entry in self.attempts
        ]
        return pb.ReplicaFrame(deltas=deltas)


def decode_steps(engine: Engine) -> int:
    """How many of the next steps only decode, if nothing reaches the engine."""
    scheduler, exchange = engine.scheduler, engine.exchange
    running = scheduler.running
    if not running or len(scheduler.waiting) or exchange.busy or exchange.pending:
        return 0
    if scheduler.limits.batches != 1 or len(running) > scheduler.limits.max_num_batched_tokens:
        return 0
    most = MOST_STEPS
    for request in running:
        table = request.table
        if table is None or request.in_flight or request.deadline is not None or request.prefill_only:
            return 0
        if not request.has_output or request.suspect or request.guide is not None or request.times.preempted_at:
            return 0
        if len(request.tokens) - request.computed != 1:
            return 0
        computed = request.computed
        until_end = request.max_len - len(request.tokens) - 1
        most = min(most, until_end, table.capacity - computed, table.unpublished_end - computed - 1)
        if most < LEAST_STEPS:
            return 0
    return most


class Stretch:
    """One, from its first step on."""

    def __init__(self, engine: Engine, runner: LatencyRunner, load: LoadSnapshot, start: float, count: int) -> None:
        """load: before it. start: of the first step. count: of `decode_steps`."""
        self.attempts = [
            StretchAttempt(
                request.attempt_id,
                len(request.tokens) - request.prompt_len,
                request.computed,
                request.preemptions,
            )
            for request in engine.scheduler.running
        ]
        self.done = 0  # steps that have begun
        self.next_start = start
        self._running: StretchStep | None = None
        self._load = load
        self._engine = engine
        self._runner = runner
        self._requests = list(engine.scheduler.running)
        self._kv = sum(request.computed for request in self._requests)
        self._factors = [runner.draw_factor() for _ in range(count)]
        self._seconds: list[float] = []
        end = start
        for number, factor in enumerate(self._factors, 1):
            sequences = len(self._requests)
            seconds = runner.decode_seconds(sequences, self._kv + sequences * number, factor)
            self._seconds.append(seconds)
            end = end + seconds
        self.end = end

    @property
    def complete(self) -> bool:
        return self.done == len(self._seconds)

    def begin_step(self, number: int, speeds: list[SourceSpeed]) -> float:
        """The next one begins, as `Engine.step` would run it. Returns its seconds.

        number: of the replica. speeds: of transfers.
        """
        engine, start, seconds = self._engine, self.next_start, self._seconds[self.done]
        self.done += 1
        end = self.next_start = start + seconds
        sequences = len(self._requests)
        counts = 0, sequences, self._kv + sequences * self.done
        engine.predict_step(*counts)
        engine.account_step(*counts, end - start)
        engine.scheduler.counters.generation_tokens += sequences
        load = replace(self._load, predicted_step=engine.predicted_step, cost=engine.latency.cost, source_speeds=speeds)
        self._running = StretchStep(number, end, load, engine.scheduler.counters.generation_tokens)
        return seconds

    def end_step(self) -> StretchStep | None:
        """The step that runs has ended; None if none runs."""
        running, self._running = self._running, None
        return running

    def finish(self) -> None:
        """Gives the requests their tokens; the lengths of steps that have not begun are drawn again."""
        self._runner.put_back(self._factors[self.done :])
        for request, attempt in zip(self._requests, self.attempts, strict=True):
            request.tokens += attempt.tokens(0, self.done)
            request.computed += self.done
            request.emitted = len(request.tokens)
