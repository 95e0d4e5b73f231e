"""A request on its way: its choices run as attempts on replicas, and their updates are collected in one place."""

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType

import structlog

from headrace_proto.replica_pb2 import Submit, TokenLogprobs
from headrace_router.attempt import Attempt, Outcome
from headrace_router.choice import Choice, ChoiceUpdate
from headrace_router.errors import (
    ApiError,
    DeadlineError,
    InternalError,
    NoReplicaError,
    OverloadedError,
    ReplicaLostError,
)
from headrace_router.fleet import Fleet
from headrace_router.policy import Work
from headrace_router.replica_link import ReplicaLink
from headrace_router.request import GenerationRequest
from headrace_router.router_metrics import ChoiceObserver, RouterMetrics

log = structlog.get_logger("headrace.router.generation")


class Generation:
    """Runs a request. Entered with `async with`; leaving it, however, cancels what still runs.

    `take` gives the updates since the last call. A reader that is slow finds them merged, never queued.
    """

    def __init__(self, request: GenerationRequest, fleet: Fleet, metrics: RouterMetrics, max_attempts: int) -> None:
        self.request = request
        self.choices = [Choice(plan, request) for plan in request.choices]
        self.cached_tokens = 0
        self._fleet = fleet
        self._metrics = metrics
        self._max_attempts = max_attempts
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
        try:
            async with asyncio.timeout(self.request.deadline_seconds):
                await self._attempts(choice)
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
            self._running -= 1
            self._news.set()
            if not self._running:
                self._ended.set()

    async def _attempts(self, choice: Choice) -> None:
        excluded: list[ReplicaLink] = []
        refusals = 0
        for _ in range(self._max_attempts):
            link = self._fleet.place(self.request.card, self._work(choice), excluded)
            if link is None:
                break
            observer = self._metrics.choice_observer(self.request.card.model, link.replica_id, self._began)
            attempt = self._submit(choice, link, observer)
            try:
                # Shielded: a cancelled task would cancel the future itself, and the replica would never hear of it.
                outcome = await asyncio.shield(attempt.outcome)
            finally:
                attempt.cancel()
                self._fleet.sweep()
            if choice.failure is not None:
                raise choice.failure
            if choice.done:
                observer.finished(choice, attempt)
                return
            if outcome is Outcome.LOST and choice.output_token_ids:
                raise ReplicaLostError("The replica that was answering is gone; send the request again.")
            refusals += outcome is Outcome.REFUSED
            excluded.append(link)
            self._metrics.retried(self.request.card.model, outcome.value)
        if refusals:
            raise OverloadedError("All replicas of this model are full; try again in a moment.")
        if excluded:
            raise ReplicaLostError("The replica was lost before it answered, and no other one is ready.")
        raise NoReplicaError(f"No replica of '{self.request.card.model}' is ready; try again in a moment.")

    def _submit(self, choice: Choice, link: ReplicaLink, observer: ChoiceObserver) -> Attempt:
        def on_tokens(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], finish: int, error: str) -> None:
            if attempt.first is not None and not choice.output_token_ids:
                self._note_cached(choice, attempt.first.cached_tokens)
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
        attempt = link.submit(submit, on_tokens)
        return attempt

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
