"""A request in progress: its choices run on replicas, and their updates are collected in one place."""

import asyncio
import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import structlog

from headrace_proto.replica_pb2 import TokenLogprobs
from headrace_router.config import RouterConfig
from headrace_router.core.account import Cause, Recorder, TimeAccount
from headrace_router.core.attempt import Attempt, Outcome
from headrace_router.core.cache_miss import CacheMiss, Conversation, Holder, Visits
from headrace_router.core.choice_run import ChoiceRun, RunListener
from headrace_router.core.errors import ApiError, InternalError
from headrace_router.core.placement import Decision, Placed, Placement
from headrace_router.core.replica_state import ReplicaState
from headrace_router.core.retry import RetryState
from headrace_router.dispatch.choice import Choice, ChoiceUpdate, is_first
from headrace_router.dispatch.prepare import GenerationRequest
from headrace_router.dispatch.router_metrics import ChoiceMetrics, RouterMetrics
from headrace_router.text.answer_memory import key_after, message_digest
from headrace_router.text.model_card import ModelCard

SLICE_SECONDS = 0.002  # slice of the event loop's time, to begin choices
SHORT_TOKENS = 2048  # of an answer that is read again at once: about a millisecond

log = structlog.get_logger("headrace.router.generation")


class Turns:
    """Calls that requests put off to a later turn of the event loop, run in slices: one call of each request in turn.

    A request with many choices does not delay the other requests much.
    """

    def __init__(self) -> None:
        self._calls: OrderedDict[object, deque[list[Callable[[], None]]]] = OrderedDict()  # by request
        self._scheduled = False

    def soon(self, request: object, call: Callable[[], None]) -> Callable[[], None]:
        """Calls it after the current call has returned; the result cancels that. It must not raise."""
        entry = [call]
        self._calls.setdefault(request, deque()).append(entry)
        self._schedule()
        return entry.clear

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._scheduled = False
        end = time.perf_counter() + SLICE_SECONDS
        while self._calls:
            request, calls = self._calls.popitem(last=False)
            entry = calls.popleft()
            if calls:
                self._calls[request] = calls
            try:
                if entry:
                    entry.pop()()
            finally:
                if self._calls:
                    self._schedule()
            if time.perf_counter() >= end:
                break


class Signal:
    """What asyncio.Event and asyncio.timeout do together, for one reader that waits once per token.

    A timer for each wait would cost as much as all else that a token costs. One is kept instead, which checks how long
    the reader has waited when it is due.
    """

    def __init__(self) -> None:
        self._set = False
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._since = 0.0  # start of the wait, on the event loop's clock

    def set(self) -> None:
        self._set = True
        self._wake()

    async def wait(self, seconds: float | None = None) -> bool:
        """Waits until it is set, and clears it; False after so many seconds in which it was not set.

        seconds: the same in all waits.
        """
        if not self._set:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            if seconds is not None:
                self._since = loop.time()
                if self._timer is None:
                    self._timer = loop.call_later(seconds, self._check, seconds)
            try:
                await self._waiter
            finally:
                self._waiter = None
        found, self._set = self._set, False
        return found

    def close(self) -> None:
        """There is no further wait."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self, seconds: float) -> None:
        self._timer = None
        if self._waiter is None:
            return  # the next wait makes a timer
        loop = asyncio.get_running_loop()
        left = self._since + seconds - loop.time()
        if left > 0:
            self._timer = loop.call_later(left, self._check, seconds)
        else:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class RunningRequest:
    """Runs a request. Entered with `async with`; every exit cancels what still runs.

    `take` returns the updates since the last call. For a slow reader updates are merged, never queued.
    """

    def __init__(
        self,
        request: GenerationRequest,
        placement: Placement[ModelCard],
        metrics: RouterMetrics,
        config: RouterConfig,
        turns: Turns,
        account: TimeAccount,
        visits: Visits,
    ) -> None:
        """turns: of all requests. account: of the time from here on, for the first choice. visits: earlier chats."""
        self.request = request
        self.visits = visits
        self.cache_miss: CacheMiss | None = None  # of the first choice, from its first token on
        self._metrics = metrics
        self._timers = LoopTimers(self, turns)
        self.account = account
        self.choices = [
            Choice(
                choice,
                request.card,
                request.stop,
                request.parser() if request.parser is not None else None,
                request.calls_before,
                request.special,
            )
            for choice in request.choices
        ]
        self.cached_tokens = 0
        self._updates: dict[int, ChoiceUpdate] = {}
        self._updated = Signal()
        self._ended = asyncio.Event()
        self._failure: ApiError | None = None
        self._running = 0
        self._runs: list[ChoiceRun[ModelCard]] = []
        for choice in self.choices:
            self._runs.append(self._run(choice, placement, metrics, config))

    def _run(
        self, choice: Choice, placement: Placement[ModelCard], metrics: RouterMetrics, config: RouterConfig
    ) -> ChoiceRun[ModelCard]:
        retry: RetryState[ReplicaState[ModelCard]] = RetryState(
            choice.request.model,
            config.max_attempts,
            config.migration_limit,
            config.migration_patience_seconds,
            random.random,
        )
        copy = choice.request.sampling.choice_index
        leader = self._runs[-copy] if copy else None  # the first choice of the same prompt
        # Metrics and the account see the answer as it was before the new tokens: the client's queue comes last.
        listeners: list[RunListener] = [ChoiceMetrics(metrics, choice, time.monotonic()), _ClientQueue(self, choice)]
        if choice.request.index == 0:
            listeners.insert(1, Recorder(self.account, time.monotonic))
        return ChoiceRun(choice.request, choice, placement, retry, self._timers, listeners, leader)

    @property
    def done(self) -> bool:
        """Whether every choice is finished and every update was read."""
        return self._running == 0 and not self._updates

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.output_token_ids) for choice in self.choices)

    @property
    def reasoning_tokens(self) -> int:
        return sum(choice.reasoning_tokens for choice in self.choices)

    async def __aenter__(self) -> "RunningRequest":
        self._running = len(self._runs)
        self.account.begin(
            self.request.prompt_tokens, lambda: (self.completion_tokens, self.cached_tokens), time.monotonic()
        )
        try:
            await self._begin()
        except BaseException:
            self._cancel()
            raise
        return self

    async def _begin(self) -> None:
        """Begins all choices: each is placed, so it is done in slices."""
        end = time.perf_counter() + SLICE_SECONDS
        for run in self._runs:
            if time.perf_counter() >= end:
                await asyncio.sleep(0)
                end = time.perf_counter() + SLICE_SECONDS
            run.begin()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancel()

    def _cancel(self) -> None:
        self._updated.close()
        for run in self._runs:
            run.cancel()

    async def take(self, seconds: float | None = None) -> list[ChoiceUpdate]:
        """Waits for updates; an empty list after `seconds` without one. Raises the first ApiError of any choice."""
        if not await self._updated.wait(seconds):
            return []
        if self._failure is not None:
            raise self._failure
        updates = list(self._updates.values())
        self._updates.clear()
        return updates

    async def finish(self) -> list[ChoiceUpdate]:
        """Waits for the end; one update per choice, in order. Raises the first ApiError of any choice."""
        await self._ended.wait()
        if self._failure is not None:
            raise self._failure
        return [self._updates.pop(index) for index in sorted(self._updates)]

    def add_update(self, update: ChoiceUpdate) -> None:
        """Adds what became visible of a choice."""
        waiting = self._updates.get(update.index)
        if waiting is None:
            self._updates[update.index] = update
        else:
            waiting.extend(update)
        self._updated.set()

    def found_cached(self, cached: int, decision: Decision | None) -> None:
        """The first choice begins; a cache had so many tokens of its prompt."""
        turn, first = self.request.turn, self.request.choices[0]
        if turn is None or first.sampling.HasField("prompt_logprobs"):
            return
        tokens = len(first.prompt_token_ids)
        miss = self.visits.miss(turn, first.blocks, tokens, cached, decision, time.monotonic())
        if miss is not None:
            self.cache_miss = self.account.cache_miss = miss
            self._metrics.cache_missed.labels(turn.model, miss.reason).inc(miss.tokens)

    def answered(self, choice: Choice, holder: Holder) -> None:
        """A choice is complete: later turns of the conversation repeat it. holder: where its KV blocks are.

        A long answer is read again in a thread.
        """
        turn, make_parser = self.request.turn, self.request.parser
        if turn is None:
            return
        read = partial(choice.message, make_parser() if make_parser is not None else None)
        if len(choice.output_token_ids) <= SHORT_TOKENS:
            self._remember(turn, choice, holder, read())
            return
        reading = asyncio.get_running_loop().run_in_executor(None, read)
        reading.add_done_callback(lambda done: self._remember(turn, choice, holder, done.result()))

    def _remember(self, turn: Conversation, choice: Choice, holder: Holder, message: Mapping[str, Any] | None) -> None:
        answer = None
        if message is not None and self.request.remember is not None:
            self.request.remember(message, choice.output_token_ids)
            digest = message_digest(message)
            answer = digest, key_after(turn.keys[-1], digest)
        if not choice.request.index:
            self.visits.add(self.account.answer_id, turn, answer, self.request.choices[0].blocks, holder)

    def choice_ended(self, failure: Exception | None) -> None:
        """One choice is complete, or failed."""
        if failure is not None:
            self.fail(failure)
        self._running -= 1
        if not self._running:  # while other choices run, the last update has woken the reader already
            self.account.enter(Cause.CLIENT, time.monotonic())
            self._updated.set()
            self._ended.set()

    def fail(self, failure: Exception) -> None:
        """Ends the request with an error; later errors are ignored."""
        if not isinstance(failure, ApiError):
            log.error("generation failed", request=self.request.label, exc_info=failure)
            failure = InternalError("The server failed on this request; its log has the details.")
        if self._failure is None:
            self._failure = failure
        self._updated.set()
        self._ended.set()


class _ClientQueue:
    """The listener by which a choice's answer reaches the client: tokens become updates, which wait to be read."""

    def __init__(self, running: RunningRequest, choice: Choice) -> None:
        self._running = running
        self._choice = choice
        self._placed: Placed[ModelCard] | None = None

    def placed(self, placed: Placed[ModelCard]) -> None:
        """Nothing is visible to the client."""
        self._placed = placed

    def add_tokens(
        self, attempt: Attempt, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], finish: int, error: str
    ) -> None:
        choice = self._choice
        if not choice.output_token_ids and is_first(choice.request):  # usage counts each prompt once
            self._running.cached_tokens += attempt.cached_tokens
            if not choice.request.index:
                decision = self._placed.decision if self._placed is not None else None
                self._running.found_cached(attempt.cached_tokens, decision)
        if token_ids and choice.lacks_prompt_logprobs:
            choice.prompt_logprobs = list(attempt.prompt_logprobs)
        update = choice.consume(token_ids, logprobs, finish, error)
        if update is not None:
            self._running.add_update(update)

    def left(self, replica_id: str, outcome: Outcome, begun: bool) -> None:
        if begun and outcome is Outcome.LOST:
            request = self._choice.request
            log.info("stream moves", request=request.label, choice=request.index, lost=replica_id)

    def ended(self, attempt: Attempt | None, failure: Exception | None) -> None:
        if self._placed is not None and failure is None:
            self._running.answered(self._choice, self._placed.replica.build)
        self._running.choice_ended(failure)


class LoopTimers:
    """Timers of the running event loop, for one request."""

    def __init__(self, request: object, turns: Turns) -> None:
        self._request = request
        self._turns = turns
        self._loop = asyncio.get_running_loop()

    def now(self) -> float:
        return time.monotonic()

    def soon(self, call: Callable[[], None]) -> Callable[[], None]:
        return self._turns.soon(self._request, call)

    def after(self, seconds: float, call: Callable[[], None]) -> Callable[[], None]:
        return self._loop.call_later(seconds, call).cancel
