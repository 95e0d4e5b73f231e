"""The replica with the lowest predicted cost in seconds, chosen together with where its prompt is computed.

    time until the first token:  the prompts that wait there, then the part of this one that is not in its cache, in
                                 steps that also compute the tokens of the streams that run there; and its turn for a
                                 row and for memory, if all are taken; what is in host memory or on disk is loaded
                                 meanwhile
    time of the answer:          its tokens, in steps with one sequence more
    delay of others:             the streams that run there wait for the prompt, and then for one sequence more

A prefill replica is a candidate, too (mode `shared`): an answer there delays the prompts that come to it, which is not
predicted, so it must be faster by KEPT_SHARE, however it gets the prompt. A way over two replicas must be faster by
ERROR_SHARE of its time until the first token.

Three ways to get the prompt's KV blocks are compared for the best candidates: computing what its cache lacks; fetching
a prefix from another replica's cache and computing the rest; letting a prefill replica compute it. All seconds count
the same. What was sent and is not in a replica's report yet counts as queued. A hot prefix spreads by itself: where it
is cached the queue grows until another replica is faster without it.

Whether a prefill replica should compute a prompt instead of the replica that decodes it: compares predicted seconds.

target:  the prompts in its queue, then this one; the streams that run there are delayed by it
source:  the prompts in its queue, then this one, and its transfer; then one step of the target
"""

import numpy as np

from headrace_router.core.policy.forecast import Forecast, StepCosts, fetch_seconds, transfer_seconds
from headrace_router.core.policy.interface import (
    Column,
    PlacementTask,
    Policy,
    Prediction,
    RequestPlacement,
    Tokens,
    View,
    Way,
    first_after,
)

LEAST_TOKENS = 64
ERROR_SHARE = 0.5  # share of the time until a prompt is computed elsewhere, which depends on what two replicas do


class PrefillForecast:
    """The forecast of one prompt, computed by each prefill replica."""

    def __init__(self, forecast: Forecast, queue: Column, sources: View, work: PlacementTask) -> None:
        """forecast, queue: of the targets."""
        computing = Forecast(sources, StepCosts.of(sources, forecast.view), work.tokens, work.answer_tokens)
        missing = np.maximum(1.0, work.tokens - work.sources_cached)
        self._forecast = forecast
        self._sources = sources
        self._queue = queue
        self._computed = computing.queue(missing) + computing.compute(missing)
        self._others = computing.prompt_delay(missing)

    def way(self, target: int) -> Way | None:
        """By the prefill replica that is the fastest for this target; None if it is the only one itself."""
        forecast, sources = self._forecast, self._sources
        candidate = forecast.view.candidates[target]
        seconds = self._computed + transfer_seconds(candidate, sources, forecast.tokens, self._computed)
        costs = seconds + self._others
        source = int(costs.argmin())
        if sources.candidates[source] is candidate:  # which computes the prompt without a transfer
            costs[source] = np.inf
            source = int(costs.argmin())
        if costs[source] == np.inf:
            return None
        # The fetch starts, and ends, between two of the target's steps.
        arrived = float(seconds[source] + forecast.next_step[target])
        first_token = max(arrived, float(self._queue[target])) + float(forecast.step[target])
        delay = float(forecast.least_delay[target] + self._others[source])
        return Way(target, first_token, delay, source=source)


def choose_source(view: View, target: int, sources: View, work: PlacementTask) -> int | None:
    """The index of the fastest source, or None when the target should compute the prompt itself.

    `always` only chooses among sources.
    """
    if not work.may_disaggregate:
        return None
    forecast = Forecast(view, StepCosts.of(view, sources), work.tokens, work.answer_tokens, work.reused)
    missing = np.maximum(1.0, work.tokens - work.cached)
    queue = forecast.queue(missing)
    way = PrefillForecast(forecast, queue, sources, work).way(target)
    if way is None or work.disaggregation == "always":
        return way.source if way is not None else None
    local = queue + forecast.compute(missing) + forecast.delay(missing)
    return way.source if (1 + ERROR_SHARE) * way.first_token + way.delay < local[target] else None


COMPARED = 4  # candidates for which fetching and disaggregation are compared with computing
STEPS = 2.0  # steps of the target, and of the holder, until a fetch has ended
EXPLORED_SHARE = 25  # one of so many requests may go to a replica that was not used lately
UNUSED_SECONDS = 5.0  # before another one was
LONG_UNUSED_SECONDS = 30.0  # from then on although others have the prompt
EXPLORED_HIT = 0.5  # share of such a request's prompt that may be in a cache
KEPT_SHARE = 0.05  # by which a prefill replica must answer faster
LEAST_FETCHED = 256  # tokens: of fewer the messages take longer than computing


class Predicted(Policy):
    """Sends one of many requests to a replica that was not used lately (`_unused`).

    Replicas count as equal if their costs differ by less than the predictions err.

    The equal replica with most of the prompt in its cache is chosen. Replicas with as much of the prompt take turns:
    otherwise the replica whose last steps happened to be the fastest would get all requests of an idle cluster.
    """

    uses_cache = True
    shares_roles = True

    def __init__(self) -> None:
        self._turn = 0

    def plan(self, view: View, sources: View, work: PlacementTask) -> RequestPlacement:
        self._turn += 1
        forecast = Forecast(view, StepCosts.of(view, sources), work.tokens, work.answer_tokens, work.reused)
        missing = np.maximum(1.0, work.tokens - work.cached)
        queue, answer = forecast.queue(missing), forecast.answer_seconds()
        loaded, computed = forecast.loads(work.offloaded, queue)
        missing += computed
        first_token = np.maximum(queue, loaded) + forecast.compute(missing)
        delay = forecast.delay(missing)
        costs = first_token + answer + delay
        # Prefill replicas stay free for prompts, unless the others are busy.
        share = 1.0 + KEPT_SHARE * view.of("prefill")
        preferred = share * (first_token + answer) + delay
        target = _best(preferred, forecast.costs.error, work.cached, self._turn)
        best = Way(target, float(first_token[target]), float(delay[target]))
        lowest = float(preferred[target])

        for way in self._other_ways(forecast, sources, work, queue, answer, share):
            cost = (way.first_token + float(answer[way.target])) * float(share[way.target]) + way.delay
            error = ERROR_SHARE * way.first_token if way.source is not None else float(forecast.costs.error[way.target])
            if cost + error < lowest or (
                work.disaggregation == "always" and way.source is not None and best.source is None
            ):
                best, lowest = way, cost
        other = self._explored(view, best, work)
        if other is not None:
            best = Way(other, float(first_token[other]), float(delay[other]))
        prediction = Prediction(best.first_token, float(answer[best.target]), best.delay)
        return RequestPlacement(best.target, best.source, best.holder, prediction, costs)

    def _explored(self, view: View, best: Way, work: PlacementTask) -> int | None:
        """A replica that was not used lately, for one of some requests."""
        if self._turn % EXPLORED_SHARE or work.output_tokens or best.source is not None or best.holder is not None:
            return None
        new = work.cached[best.target] <= EXPLORED_HIT * work.tokens
        return _unused(view, UNUSED_SECONDS if new else LONG_UNUSED_SECONDS)

    def _other_ways(
        self, forecast: Forecast, sources: View, work: PlacementTask, queue: Column, answer: Column, share: Column
    ) -> list[Way]:
        """The ways over two replicas, for the candidates that would be the best if they had the prompt already."""
        if not work.may_disaggregate and work.held.max() < LEAST_FETCHED:
            return []
        without = share * (queue + forecast.step + answer) + forecast.least_delay
        count = min(COMPARED, len(without))
        near = np.argpartition(without, count - 1)[:count].tolist()
        ways = self._fetches(forecast, work, queue, near)
        if work.may_disaggregate:
            prefill = PrefillForecast(forecast, queue, sources, work)
            ways += [way for target in near if (way := prefill.way(target)) is not None]
        return ways

    def _fetches(self, forecast: Forecast, work: PlacementTask, queue: Column, near: list[int]) -> list[Way]:
        """From the cache of the candidate that has most of the prompt."""
        holder = int(work.held.argmax())
        held = int(work.held[holder])
        ways = []
        if held < LEAST_FETCHED:
            return []
        few = forecast.at(near)
        missing = np.full(len(near), max(1.0, work.tokens - held))
        computed = few.compute(missing).tolist()
        delays = few.delay(missing, np.maximum(0.0, held - work.cached[near])).tolist()
        step_ms = forecast.view.of("last_step_ms")
        for target, compute, delay in zip(near, computed, delays, strict=True):
            fetched = held - int(work.cached[target])
            if target == holder or fetched < LEAST_FETCHED or forecast.short_of_memory[target]:
                continue
            candidates, rate = forecast.view.candidates, float(forecast.costs.per_prefill_token[target])
            # Each replica handles messages between two steps.
            fetch = STEPS * float(step_ms[target] + step_ms[holder]) / 1e3
            fetch += fetch_seconds(candidates[target], candidates[holder], fetched, rate)
            first_token = max(fetch, float(queue[target])) + compute
            ways.append(Way(target, first_token, delay, holder=holder))
        return ways


def _unused(view: View, seconds: float) -> int | None:
    """The idle replica that was used the longest time ago, if it seems too slow to be used at all.

    Its step model may be old, or of a moment in which the machine did something else: it learns only from steps.
    """
    used = view.of("used_at")
    unused = (view.requests == 0) & (used < used.max() - seconds)
    return int(np.where(unused, used, np.inf).argmin()) if unused.any() else None


def _best(costs: Column, errors: Column, cached: Tokens, turn: int) -> int:
    lowest = int(costs.argmin())
    equal = costs - errors <= costs[lowest] + errors[lowest]
    equal[lowest] = True
    most = cached[equal].max()
    return first_after(equal & (cached == most), turn)
