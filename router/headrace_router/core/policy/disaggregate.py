"""Whether a prefill replica should compute a prompt instead of the replica that decodes it: compares predicted seconds.

target:  the prompts in its queue, then this one; the streams that run there are delayed by it
source:  the prompts in its queue, then this one, and its transfer; then one step of the target
"""

import numpy as np

from headrace_router.core.policy.forecast import Forecast, StepCosts
from headrace_router.core.policy.interface import Work
from headrace_router.core.policy.transfer import transfer_seconds
from headrace_router.core.policy.view import Column, View
from headrace_router.core.policy.way import Way

LEAST_TOKENS = 64
ERROR_SHARE = 0.5  # of the time until a prompt was computed elsewhere: it depends on what two replicas do meanwhile


class PrefillForecast:
    """Of one prompt, computed by each prefill replica."""

    def __init__(self, forecast: Forecast, queue: Column, sources: View, work: Work) -> None:
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


def choose_source(view: View, target: int, sources: View, work: Work) -> int | None:
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
