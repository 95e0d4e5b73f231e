"""Outputs of requests: the newest token of each, and with the first and the last one what is known of its time."""

from collections.abc import Callable

from headrace_worker.core.plan import StepResult
from headrace_worker.core.request import Finish, Output, Request
from headrace_worker.core.request_times import StepTotals
from headrace_worker.core.scheduler_counters import SchedulerCounters


class Emitter:
    """For one scheduler."""

    def __init__(self, counters: SchedulerCounters, totals: StepTotals, clock: Callable[[], float]) -> None:
        self._counters = counters
        self._totals = totals
        self._clock = clock

    def emit(self, request: Request, position: int, result: StepResult) -> Output:
        """The request's newest token, and its end when this token ends it; the caller ends it then."""
        token = request.tokens[-1]
        count = request.emitted = len(request.tokens)
        finish = None
        if token in request.stop_ids:
            finish = Finish.STOP
        elif request.complete:
            finish = Finish.COMPLETE
        elif count >= request.max_len:
            finish = Finish.LENGTH
        logprobs = [result.logprobs[position]] if position in result.logprobs else []
        output = Output(
            request.attempt_id,
            count - 1 - request.prompt_len,
            [token],
            logprobs,
            finish,
            preemptions=request.preemptions,
        )
        times = request.times
        if times.preempted_at is not None:
            times.resumed(self._clock())
        if not request.has_output:
            request.has_output = True
            if request.counts_prompt:  # counted once it is computed: a refused prompt never counts
                self._counters.prompt_tokens += request.prompt_len
            output.cached_tokens = request.cached_tokens
            output.prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, []
            started = request.started or request.arrival
            output.queue_seconds = started - request.arrival
            output.times = times.first_token(self._clock(), started, self._totals)
        elif finish is not None:
            output.times = times.end(self._clock(), self._totals)
        self._counters.generation_tokens += 1
        return output
