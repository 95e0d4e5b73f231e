"""The step loop: one thread that owns the engine. Other threads queue commands and receive reports."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from headrace_worker.core.engine import Engine, LoadSnapshot
from headrace_worker.core.kv.blocks import CacheChange
from headrace_worker.core.request import Finish, Output, Request
from headrace_worker.core.transfer.exchange import Outbound, TransferExchange

log = structlog.get_logger(__name__)

IDLE_TICK = 0.25
"""Seconds between heartbeats of an idle loop."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """The outcome of one iteration of the loop; `step` counts iterations, idle ones included: the heartbeat."""

    step: int
    outputs: list[Output]
    load: LoadSnapshot
    cache_changes: list[CacheChange]
    draining: bool
    outbound: Outbound | None = None  # messages to other replicas


class EngineLoop:
    """Runs an engine on its own thread.

    `sink` is called on that thread once per iteration and must only pass the report on. When the loop fails, every
    request that it held gets a cancelled output in a last report, and `failure` is the cause.
    """

    def __init__(self, engine: Engine, sink: Callable[[StepReport], None], clock: Callable[[], float] = time.monotonic):
        self.failure: BaseException | None = None
        self.ended = threading.Event()
        self._engine = engine
        self._sink = sink
        self._clock = clock
        self._wake = threading.Condition()
        self._commands: deque[Callable[[], Output | None]] = deque()
        self._stopping = False
        self._draining = False
        self._step = 0
        self._held: set[bytes] = set()
        self._thread = threading.Thread(target=self._run, name="headrace-steps", daemon=True)

    @property
    def clock(self) -> Callable[[], float]:
        """The clock of request deadlines."""
        return self._clock

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Queues a request for the engine; its outputs, a refusal included, are passed to the sink."""
        self._command(lambda: self._accept(request))

    def cancel(self, attempt_id: bytes) -> None:
        """Ends an attempt; unknown ids are ignored, as the attempt may just have ended."""
        self._command(lambda: self._engine.cancel(attempt_id))

    def drain(self) -> None:
        """Refuses new requests from now on; current ones continue."""
        self._draining = True
        self._command(lambda: None)

    def exchange(self, action: Callable[[TransferExchange], None]) -> None:
        """Runs `action` with the engine's exchange, on the loop's thread."""

        def command() -> None:
            action(self._engine.exchange)

        self._command(command)

    def run_empty_step(self) -> None:
        """Runs an empty step when the engine has no work."""
        self._command(self._engine.run_empty_step)

    def abandon(self, error: BaseException) -> None:
        """The runner is lost, and the loop's thread may be blocked in it: sets `ended` at once."""
        self.failure = self.failure or error
        self._command(lambda: None)
        self.ended.set()

    def stop(self, timeout: float = 10.0) -> None:
        """Ends the loop after the current step; remaining requests get a cancelled output."""
        self._stopping = True
        self._command(lambda: None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _command(self, command: Callable[[], Output | None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _accept(self, request: Request) -> Output | None:
        if self._draining:
            return Output(request.attempt_id, 0, [], finish=Finish.REFUSED, error="the replica is draining")
        refusal = self._engine.submit(request)
        if refusal is None:
            self._held.add(request.attempt_id)
        return refusal

    def _run(self) -> None:
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

    def _run_once(self) -> None:
        self._wait_for_work()
        outputs = [output for command in self._take_commands() if (output := command()) is not None]
        if self._engine.has_work or self._engine.exchange.busy:
            outputs += self._engine.step()
        for output in outputs:
            if output.finish is not None:
                self._held.discard(output.attempt_id)
        self._report(outputs)

    def _wait_for_work(self) -> None:
        with self._wake:
            if not self._commands and not self._engine.has_work:
                self._wake.wait(IDLE_TICK)

    def _take_commands(self) -> list[Callable[[], Output | None]]:
        with self._wake:
            commands = list(self._commands)
            self._commands.clear()
        return commands

    def _report(self, outputs: list[Output]) -> None:
        self._step += 1
        engine = self._engine
        outbound = engine.exchange.take_outbound()
        self._sink(
            StepReport(
                self._step, outputs, engine.load(), engine.take_cache_changes(), self._draining, outbound or None
            )
        )

    def _end_all(self, finish: Finish, error: str) -> None:
        outputs = [Output(attempt_id, 0, [], finish=finish, error=error) for attempt_id in self._held]
        self._held.clear()
        self._report(outputs)
