"""A request on its way: its choices run as attempts on replicas, and their updates are collected in one place."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import structlog

from headrace_proto.replica_pb2 import Source, Submit, TokenLogprobs
from headrace_router.attempt import Attempt, Outcome
from headrace_router.choice import Choice, ChoiceUpdate
from headrace_router.config import RouterConfig
from headrace_router.errors import (
    ApiError,
    DeadlineError,
    InternalError,
)
from headrace_router.fleet import Fleet
from headrace_router.journey import Journey, Loss
from headrace_router.policy import Work
from headrace_router.replica_link import ReplicaLink
from headrace_router.request import GenerationRequest
from headrace_router.router_metrics import ChoiceObserver, RouterMetrics

LOOK_SECONDS = 0.1  # between two looks for a ready replica

log = structlog.get_logger("headrace.router.generation")


@dataclass(frozen=True, slots=True)
class _Giver:
    """A replica that has KV blocks, or computes them."""

    link: ReplicaLink
    computes: bool

    def message(self) -> Source:
        return Source(replica_id=self.link.replica_id, address=self.link.address, cached_only=not self.computes)


class Generation:
    """Runs a request. Entered with `async with`; leaving it, however, cancels what still runs.

    `take` gives the updates since the last call. A reader that is slow finds them merged, never queued.
    """

    def __init__(self, request: GenerationRequest, fleet: Fleet, metrics: RouterMetrics, limits: RouterConfig) -> None:
        self.request = request
        self.choices = [Choice(plan, request) for plan in request.choices]
        self.cached_tokens = 0
        self._fleet = fleet
        self._metrics = metrics
        self._limits = limits
        self._began = time.monotonic()
        self._updates: dict[int, ChoiceUpdate] = {}
        self._news = asyncio.Event()
        self._ended = asyncio.Event()
        self._failure: ApiError | None = None
        self._running = 0
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def done(self) -> bool:
        """Whether every choice is finished and every update was taken."""
        return self._running == 0 and not self._updates

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.output_token_ids) for choice in self.choices)

    async def __aenter__(self) -> "Generation":
        self._running = len(self.choices)
        self._tasks = [asyncio.create_task(self._run(choice)) for choice in self.choices]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()

    async def take(self, seconds: float | None = None) -> list[ChoiceUpdate]:
        """Waits for news; an empty list after `seconds` of silence. Raises the first ApiError of any choice."""
        if not self._news.is_set():
            try:
                async with asyncio.timeout(seconds):
                    await self._news.wait()
            except TimeoutError:
                return []
        self._news.clear()
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

    async def _run(self, choice: Choice) -> None:
        """One choice to its end: places it, and places it again when its replica refuses or dies."""
        sent: list[Attempt] = []
        try:
            async with asyncio.timeout(self.request.deadline_seconds):
                await self._attempts(choice, sent)
        except ApiError as error:
            self._fail(error)
        except TimeoutError:
            self._fail(DeadlineError("The request's time was over before the answer was complete."))
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("generation failed", request=self.request.label)
            self._fail(InternalError("The server failed on this request; its log tells more."))
        finally:
            for attempt in sent:  # one may have been moved in the moment in which the client left
                attempt.release()
            self._running -= 1
            if not self._running:  # one choice's end among others is no news: its last update was
                self._news.set()
                self._ended.set()

    async def _attempts(self, choice: Choice, sent: list[Attempt]) -> None:
        """Attempts until one ends the choice, each noted in `sent`. The next goes on after what is out."""
        model = self.request.card.model
        journey: Journey[ReplicaLink] = Journey(
            model, self._limits.max_attempts, self._limits.migration_limit, self._limits.migration_patience_seconds
        )
        observer: ChoiceObserver | None = None
        left: ReplicaLink | None = None  # where the stream was, if it may still have its blocks
        kept: Attempt | None = None  # there, until the next attempt has tokens
        while True:
            begun = bool(choice.output_token_ids)
            work = self._work(choice)
            link = self._fleet.place(self.request.card, work, journey.excluded)
            if link is None:
                if kept is not None:
                    kept.release()
                journey.nowhere(begun, time.monotonic())
                await asyncio.sleep(LOOK_SECONDS)
                continue
            journey.placed()
            observer = observer or self._metrics.choice_observer(model, self._began)
            observer.at(link.replica_id)
            giver = self._giver(link, left, work)
            attempt = self._submit(choice, link, observer, giver, kept)
            sent.append(attempt)
            try:
                # Shielded: a cancelled task would cancel the future itself, and the replica would never hear of it.
                outcome = await asyncio.shield(attempt.outcome)
            finally:
                attempt.cancel()
                if kept is not None:
                    kept.release()
                if giver is not None:
                    giver.link.promise_kept(attempt.id)
                self._fleet.sweep()
            if choice.failure is not None:
                raise choice.failure
            if choice.done:
                observer.finished(choice, attempt)
                return
            begun = bool(choice.output_token_ids)
            kept = attempt if outcome is Outcome.MOVED else None
            if kept is not None:
                left = link
                journey.moved(link)
                self._metrics.rebalanced(model)
                continue
            loss = Loss.REFUSED if outcome is Outcome.REFUSED else Loss.LOST
            moved = begun and loss is Loss.LOST
            left = link if moved else None
            journey.ended(link, loss, begun)
            if moved:
                self._metrics.migrated(model)
                log.info("stream moves", request=self.request.label, choice=choice.plan.index, lost=link.replica_id)
            else:
                self._metrics.retried(model, outcome.value)

    def _submit(
        self,
        choice: Choice,
        link: ReplicaLink,
        observer: ChoiceObserver,
        giver: "_Giver | None",
        kept: Attempt | None,
    ) -> Attempt:
        """Sends the choice to a replica. `kept`: an attempt that is released once this one has tokens."""

        def on_tokens(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], finish: int, error: str) -> None:
            if attempt.first is not None and not choice.output_token_ids:
                self._note_cached(choice, attempt.first.cached_tokens)
            if giver is not None:
                giver.link.promise_kept(attempt.id)
            if kept is not None:
                kept.release()
            observer.tokens(len(token_ids))
            update = choice.consume(token_ids, logprobs, finish, error)
            if update is not None:
                self._post(update)
            if choice.done and not finish:
                attempt.end(Outcome.FINISHED)  # a stop string: the replica would go on

        request = self.request
        submit = Submit(
            request_label=request.label,
            model=request.card.model,
            revision=request.card.revision,
            tenant_salt=request.tenant.salt,
            prompt_token_ids=choice.plan.prompt.token_ids,
            output_token_ids=choice.output_token_ids,
            sampling=choice.plan.sampling,
            deadline_ms=self._remaining_ms(),
        )
        if giver is not None:
            submit.source.CopyFrom(giver.message())
        attempt = link.submit(submit, on_tokens)
        if giver is not None and giver.computes:
            giver.link.promise(attempt.id, len(submit.prompt_token_ids) + len(submit.output_token_ids))
        return attempt

    def _giver(self, link: ReplicaLink, left: ReplicaLink | None, work: Work) -> "_Giver | None":
        """Whom a replica should fetch KV blocks from: where the stream was, or a prefill replica, if that pays."""
        if left is not None and left.connected and left is not link:
            return _Giver(left, computes=False)
        source = self._fleet.source(link, self.request.card, work)
        return _Giver(source, computes=True) if source is not None else None

    def _note_cached(self, choice: Choice, cached: int) -> None:
        # Each prompt is counted once in usage; its first choice says how much of it was cached.
        first = next(plan for plan in self.request.choices if plan.prompt is choice.plan.prompt)
        if first is choice.plan:
            self.cached_tokens += cached

    def _remaining_ms(self) -> int:
        if self.request.deadline_seconds is None:
            return 0
        left = self.request.deadline_seconds - (time.monotonic() - self._began)
        return max(1, int(left * 1000))

    def _work(self, choice: Choice) -> Work:
        return Work(
            prompt_token_ids=choice.plan.prompt.token_ids,
            output_tokens_so_far=len(choice.output_token_ids),
            tenant_salt=self.request.tenant.salt,
            max_tokens=choice.plan.sampling.max_tokens,
        )

    def _post(self, update: ChoiceUpdate) -> None:
        waiting = self._updates.get(update.index)
        if waiting is None:
            self._updates[update.index] = update
        else:
            waiting.extend(update)
        self._news.set()

    def _fail(self, error: ApiError) -> None:
        if self._failure is None:
            self._failure = error
        self._news.set()
        self._ended.set()
