"""The step loop: the thread that owns the engine. Other threads queue commands and receive reports."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from headrace_worker.assembly.command_queue import CommandQueue
from headrace_worker.assembly.step_watch import StepWatch
from headrace_worker.core.engine import Engine, LoadSnapshot
from headrace_worker.core.kv.blocks import CacheChange
from headrace_worker.core.request import Finish, Output, Request
from headrace_worker.core.transfer.exchange import Outbound

log = structlog.get_logger(__name__)

IDLE_TICK = 0.25
"""Seconds between heartbeats of an idle loop."""
BLOCKED_TICK = 0.005
"""Seconds between attempts to start requests while none runs, since transfers hold the memory."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """The outcome of one iteration of the loop; `step` counts iterations, idle ones included: the heartbeat."""

    step: int
    outputs: list[Output]
    load: LoadSnapshot
    cache_changes: list[CacheChange]
    draining: bool
    outbound: Outbound | None = None  # messages to other replicas
    accepted: int = 0  # calls of `submit` that the load includes, refused ones counted
    last: bool = False  # the loop ends
    idle_steps: int = 0  # iterations after which nothing ran


class EngineLoop:
    """Runs an engine on the thread that calls `run`.

    `sink` is called on that thread once per iteration and must only pass the report on. When the loop fails, every
    request that it held gets a cancelled output in a last report, and `failure` is the cause.
    """

    def __init__(
        self,
        engine: Engine,
        sink: Callable[[StepReport], None],
        commands: CommandQueue,
        clock: Callable[[], float] = time.monotonic,
        watch: StepWatch | None = None,
    ) -> None:
        """`commands`: the queue that the engine's transfers report to; others may use it before the loop exists.

        `watch`: of the engine's steps.
        """
        self.commands = commands
        self.failure: BaseException | None = None
        self.ended = threading.Event()
        self._returned = threading.Event()  # `run`, after its last report
        self._engine = engine
        self._sink = sink
        self._clock = clock
        self._watch = watch
        self._stopping = False
        self._draining = False
        self._step = 0
        self._idle_steps = 0
        self._accepted = 0
        self._held: set[bytes] = set()

    @property
    def clock(self) -> Callable[[], float]:
        """The clock of request deadlines."""
        return self._clock

    def submit(self, request: Request) -> None:
        """Queues a request for the engine; its outputs, a refusal included, are passed to the sink."""
        self.commands.put(lambda engine: self._accept(request))

    def cancel(self, attempt_id: bytes) -> None:
        """Ends an attempt; unknown ids are ignored, as the attempt may just have ended."""
        self.commands.put(lambda engine: engine.cancel(attempt_id))

    def drain(self) -> None:
        """Refuses new requests from now on; current ones continue."""
        self._draining = True
        self.commands.wake()

    def run_empty_step(self) -> None:
        """Runs an empty step when the engine has no work."""
        self.commands.put(Engine.run_empty_step)

    def abandon(self, error: BaseException) -> None:
        """The runner is lost, and the loop's thread may be blocked in it: sets `ended` at once."""
        self.failure = self.failure or error
        self.commands.wake()
        self.ended.set()

    def stop(self, timeout: float = 10.0) -> None:
        """Ends the loop after the current step; remaining requests get a cancelled output. From any other thread."""
        self._stopping = True
        self.commands.wake()
        self._returned.wait(timeout)

    def _accept(self, request: Request) -> Output | None:
        self._accepted += 1
        if self._draining:
            return Output(request.attempt_id, 0, [], finish=Finish.REFUSED, error="the replica is draining")
        refusal = self._engine.submit(request)
        if refusal is None:
            self._held.add(request.attempt_id)
        return refusal

    def run(self) -> None:
        """Runs until `stop`, or until the engine or its runner fails."""
        try:
            while not self._stopping and self.failure is None:
                self._run_once()
            if self.failure is not None:
                self._end_all(Finish.CANCELLED, "the replica failed")
            else:
                self._end_all(Finish.CANCELLED, "the replica is stopping")
        except BaseException as error:
            self.failure = self.failure or error
            log.error("step_loop_failed", error=type(error).__name__)
            # Cancelled, not failed: none of them is known to be the cause, and each may continue on another replica.
            self._end_all(Finish.CANCELLED, "the replica failed")
        finally:
            self.ended.set()
            self._returned.set()

    def _run_once(self) -> None:
        if not self._engine.has_work:
            self.commands.wait(IDLE_TICK)
        elif self._engine.blocked:
            self.commands.wait(BLOCKED_TICK)
        outputs = [output for command in self.commands.take() if (output := command(self._engine)) is not None]
        if self._engine.has_work or self._engine.exchange.busy:
            outputs += self._watched_step()
        if self.failure is not None:
            return  # meanwhile: what the step computed may not be valid
        for output in outputs:
            if output.finish is not None:
                self._held.discard(output.attempt_id)
        self._report(outputs)

    def _watched_step(self) -> list[Output]:
        if self._watch is None:
            return self._engine.step()
        self._watch.begin()
        try:
            return self._engine.step()
        finally:
            self._watch.end()

    def _report(self, outputs: list[Output], *, last: bool = False) -> None:
        self._step += 1
        engine = self._engine
        outbound = engine.exchange.take_outbound()
        load = engine.load()
        self._idle_steps += load.running == 0
        self._sink(
            StepReport(
                self._step,
                outputs,
                load,
                engine.take_cache_changes(),
                self._draining,
                outbound or None,
                self._accepted,
                last,
                self._idle_steps,
            )
        )

    def _end_all(self, finish: Finish, error: str) -> None:
        outputs = [Output(attempt_id, 0, [], finish=finish, error=error) for attempt_id in self._held]
        self._held.clear()
        self._report(outputs, last=True)
