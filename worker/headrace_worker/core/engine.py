"""The engine: requests in, outputs out, one step at a time. No thread, no socket, no tensor of its own."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog

from headrace_worker.core.guide import GUIDE_FAILED, Mask
from headrace_worker.core.kv.blocks import CacheChange
from headrace_worker.core.latency import StepCost, StepLatency
from headrace_worker.core.plan import StepPlan
from headrace_worker.core.request import Finish, Output, Request
from headrace_worker.core.scheduled_step import ScheduledStep
from headrace_worker.core.scheduler import Scheduler, SchedulerCounters
from headrace_worker.core.step_runner import RunnerBrokenError, StepRunner
from headrace_worker.core.transfer.exchange import TransferExchange
from headrace_worker.core.transfer.fetching import FetchCounters, SourceSpeed
from headrace_worker.core.transfer.offload import OffloadCounters
from headrace_worker.core.transfer.orders import Order
from headrace_worker.core.transfer.slots import Slots

log = structlog.get_logger(__name__)

MAX_FAILED_STEPS = 8
"""In a row, each of which fails or isolates a request: with the last of them the runner counts as broken."""


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """The engine's load as routers and the controller use it."""

    running: int
    waiting: int
    kv_usage: float
    available_blocks: int
    missing_tokens: int
    predicted_step: float  # seconds
    cost: StepCost
    counters: SchedulerCounters
    fetches: FetchCounters
    grants: int
    offload: OffloadCounters
    load_token: float  # seconds to copy the keys and values of an offloaded token; 0 = not known
    source_speeds: list[SourceSpeed]
    block_size: int  # tokens


@dataclass(slots=True)
class _Launched:
    step: ScheduledStep
    handle: Any
    at: float
    predicted: float  # seconds


class Engine:
    """Keeps up to `depth` launched steps uncollected when the next one is scheduled.

    Depth 0 is the synchronous loop: a step's tokens are known before the next step is planned.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        clock: Callable[[], float],
        depth: int = 0,
        ranks: int = 1,
        host_slots: int = 0,
        host_states: int = 0,
        files: Slots | None = None,
    ) -> None:
        """host_slots, host_states: KV blocks and recurrent states that each rank's host memory holds, beside the pools.

        files: places of each rank's file.
        """
        self.scheduler = scheduler
        self.exchange = TransferExchange(
            scheduler,
            ranks,
            clock,
            predict=lambda: (self.latency.cost.per_prefill_token, self.predicted_step),
            host_slots=host_slots,
            host_states=host_states,
            files=files,
        )
        self.latency = StepLatency()
        self._runner = runner
        self._clock = clock
        self._depth = depth
        self._launched: deque[_Launched] = deque()
        self._requests: dict[bytes, Request] = {}
        self._failed_steps = 0
        self._last_collect = clock()
        self.blocked = False  # the last step computed nothing, and nothing is in flight: it waits for memory
        self.predicted_step = 0.0  # seconds, of the newest step
        self.longest_step = 0.0  # seconds: the longest prediction of those that `step` may wait for

    @property
    def has_work(self) -> bool:
        return bool(self._launched) or self.scheduler.has_work or self.exchange.pending

    def submit(self, request: Request) -> Output | None:
        """Accepts a request; returns its refusal when the queue is full or the id is in use."""
        reason = ""
        if not self.scheduler.has_room(request.tenant_salt, self.exchange.fetcher.waiting_of):
            reason = "the replica's queue is full"
        elif request.attempt_id in self._requests:
            reason = "this attempt id is in use"
        if reason:
            return Output(request.attempt_id, 0, [], finish=Finish.REFUSED, error=reason)
        self._requests[request.attempt_id] = request
        request.times.accepted(len(self._requests) - 1, self.scheduler.totals)
        if not self.exchange.begin(request, self.latency.cost.per_prefill_token):
            self.scheduler.add(request)
        return None

    def cancel(self, attempt_id: bytes) -> Output | None:
        """Ends an attempt in any phase; None when the engine does not have it (any more)."""
        request = self._requests.pop(attempt_id, None)
        if request is not None:
            self.exchange.cancel(request)
        return self.scheduler.end(request, Finish.CANCELLED) if request is not None else None

    def step(self) -> list[Output]:
        """Schedules and launches a step, and collects one that is due. Raises RunnerBrokenError."""
        if self.exchange.busy:
            self.exchange.tick()
        outputs = self.scheduler.expire()
        scheduled = self.scheduler.schedule()
        orders: list[Order] = []
        if self.exchange.busy:
            orders = self.exchange.take_orders(scheduled.plan.step if scheduled is not None else 0)
            self.exchange.send_early()
        if orders and scheduled is None:
            scheduled = ScheduledStep(StepPlan(0, [], [], [], []), [], [])
        if scheduled is not None:
            scheduled.plan.orders.extend(orders)
            start = self._clock()
            self.predict_step(scheduled.prefill_tokens, scheduled.decode_sequences, scheduled.kv_tokens)
            self.longest_step = max([self.predicted_step, *(launched.predicted for launched in self._launched)])
            try:
                handle = self._runner.launch(scheduled.plan)
            except RunnerBrokenError:
                raise
            except Exception as error:
                outputs += self._step_failed(scheduled, error)
            else:
                self._launched.append(_Launched(scheduled, handle, start, self.predicted_step))
                if scheduled.guided:
                    outputs += self._draw(self._launched[-1])
        self.blocked = scheduled is None and not self._launched
        if len(self._launched) > self._depth or (scheduled is None and self._launched):
            outputs += self._collect(self._launched.popleft())
        for output in outputs:
            if output.finish is not None:
                self._requests.pop(output.attempt_id, None)
        return outputs

    def run_empty_step(self) -> None:
        """Runs an empty step if there is no work, for a profile that starts at a step. Raises RunnerBrokenError."""
        if not self.has_work:
            self._runner.collect(self._runner.launch(StepPlan(0, [], [], [], [])))

    def predict_step(self, prefill_tokens: int, decode_sequences: int, kv_tokens: int) -> None:
        """A step of so many begins."""
        self.predicted_step = self.latency.cost.predict(prefill_tokens, decode_sequences, kv_tokens)

    def account_step(self, prefill_tokens: int, decode_sequences: int, kv_tokens: int, seconds: float) -> None:
        """A step of so many has taken that long: adds it to the sums of requests' times and to the fit of its cost."""
        self.scheduler.totals.add(prefill_tokens, decode_sequences, kv_tokens, seconds, self.latency.cost)
        self.latency.observe(prefill_tokens, decode_sequences, kv_tokens, seconds)

    def load(self) -> LoadSnapshot:
        """The load as of the last step."""
        scheduler = self.scheduler
        pool = scheduler.kv.pool
        return LoadSnapshot(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(self.exchange.fetcher) + self.exchange.offload.waiting,
            kv_usage=pool.used / pool.total,
            available_blocks=pool.available,
            missing_tokens=scheduler.missing_tokens,
            predicted_step=self.predicted_step,
            cost=self.latency.cost,
            counters=scheduler.counters,
            fetches=self.exchange.fetcher.counters,
            grants=self.exchange.granter.granted,
            offload=self.exchange.offload.counters,
            load_token=self.exchange.offload.token_pace.seconds,
            source_speeds=self.exchange.source_speeds(),
            block_size=scheduler.kv.block_size,
        )

    def take_cache_changes(self) -> list[CacheChange]:
        return self.exchange.offload.changes(self.scheduler.kv.take_changes())

    def _draw(self, launched: _Launched) -> list[Output]:
        """Masks are always current: built from tokens that are all read back, while this step's forward pass runs."""
        outputs: list[Output] = []
        guided = launched.step.guided
        while any(request.in_flight > 1 and request.finish is None for _, request in guided):
            outputs += self._collect(self._launched.popleft())
        masks: dict[int, Mask] = {}
        for index, request in guided:
            if request.guide is None or request.finish is not None:
                continue  # it ended with a token that was just read back
            try:
                masks[index] = request.guide.mask()
            except Exception as error:
                log.error("guide_failed", error=type(error).__name__)
                outputs.append(self.scheduler.end(request, Finish.ERROR, GUIDE_FAILED))
        try:
            self._runner.draw(launched.handle, masks)
        except RunnerBrokenError:
            raise
        except Exception as error:
            self._launched.pop()
            outputs += self._step_failed(launched.step, error)
        return outputs

    def _collect(self, launched: _Launched) -> list[Output]:
        try:
            result = self._runner.collect(launched.handle)
        except RunnerBrokenError:
            raise
        except Exception as error:
            return self._step_failed(launched.step, error)
        self._failed_steps = 0
        now = self._clock()
        # With steps in flight the device time of this one starts where the last one ended.
        seconds = now - max(launched.at, self._last_collect)
        self._last_collect = now
        step = launched.step
        if step.plan.work:
            self.account_step(step.prefill_tokens, step.decode_sequences, step.kv_tokens, seconds)
        outputs = self.scheduler.process(step, result)
        if self.exchange.busy:
            self.exchange.granter.processed(step.plan.step)
        return outputs

    def _step_failed(self, step: ScheduledStep, error: Exception) -> list[Output]:
        self._failed_steps += 1
        log.error("step_failed", step=step.plan.step, requests=len(step.requests), error=type(error).__name__)
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise RunnerBrokenError(f"{self._failed_steps} steps in a row failed") from error
        return self.scheduler.fail(step, "the model failed on this request; the replica continues to serve others")
