"""Where the time of a request goes in the engine: marks of the request, and sums over all steps. Pure.

A mark holds the sums of that moment, so that a request costs a few operations, not one per step or token.
"""

from dataclasses import dataclass

from msgspec import Struct

from headrace_worker.core.latency import StepCost


class AttemptTimes(Struct, gc=False):
    """Seconds and tokens, as `headrace.v1.AttemptTimes` has them: the first ones with the first token, the last ones
    with the end."""

    fetch: float = 0.0
    compute: float = 0.0
    own_tokens: int = 0
    beside_tokens: int = 0
    ahead: int = 0
    ahead_tokens: int = 0
    prompt_preempted: float = 0.0
    snapshot_tokens: int = 0
    covered_tokens: int = 0
    decode: float = 0.0
    prompts: float = 0.0
    sequences: float = 0.0
    preempted: float = 0.0


class StepTotals:
    """Sums over the steps of an engine."""

    __slots__ = ("prompt_tokens", "prompts", "sequences")

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.prompts = 0.0  # seconds that prompts added to steps with streams
        self.sequences = 0.0  # seconds that all streams but one added to steps

    def add(self, prompt_tokens: int, sequences: int, kv_tokens: int, seconds: float, cost: StepCost) -> None:
        """One step, divided as the fitted cost divides it."""
        self.prompt_tokens += prompt_tokens
        if not sequences:
            return
        predicted = cost.predict(prompt_tokens, sequences, kv_tokens)
        if predicted <= 0:
            return
        scale = seconds / predicted
        if prompt_tokens:
            self.prompts += scale * cost.per_prefill_token * prompt_tokens
        if sequences > 1:
            others = cost.per_decode_sequence * sequences + cost.per_kv_token * kv_tokens
            self.sequences += scale * others * (sequences - 1) / sequences


@dataclass(slots=True)
class RequestTimes:
    """Marks of one attempt."""

    ahead: int = 0
    accepted_tokens: int = 0  # StepTotals.prompt_tokens when it was accepted
    fetched: float = 0.0  # seconds
    started_tokens: int = 0
    missing: int = 0  # tokens that it had to compute when it started
    snapshot_tokens: int = 0  # tokens after which it started from a snapshot; only with recurrent state
    covered_tokens: int = 0  # tokens whose keys and values were cached; only with recurrent state
    first_at: float = 0.0
    first_prompts: float = 0.0
    first_sequences: float = 0.0
    preempted_at: float | None = None
    preempted: float = 0.0

    def accepted(self, ahead: int, totals: StepTotals) -> None:
        """So many requests run or wait now."""
        self.ahead, self.accepted_tokens = ahead, totals.prompt_tokens

    def started(self, missing: int, totals: StepTotals) -> None:
        """Its first step is planned."""
        self.started_tokens, self.missing = totals.prompt_tokens, missing

    def resumed(self, now: float) -> None:
        """It has a token again after a preemption."""
        if self.preempted_at is not None:
            self.preempted += now - self.preempted_at
            self.preempted_at = None

    def first_token(self, now: float, started: float, totals: StepTotals) -> AttemptTimes:
        """Returns the times of the attempt until now."""
        self.first_at, self.first_prompts, self.first_sequences = now, totals.prompts, totals.sequences
        computed = totals.prompt_tokens - self.started_tokens
        preempted, self.preempted = self.preempted, 0.0
        return AttemptTimes(
            fetch=self.fetched,
            compute=now - started,
            own_tokens=self.missing,
            beside_tokens=max(0, computed - self.missing),
            ahead=self.ahead,
            ahead_tokens=self.started_tokens - self.accepted_tokens,
            prompt_preempted=preempted,
            snapshot_tokens=self.snapshot_tokens,
            covered_tokens=self.covered_tokens,
        )

    def end(self, now: float, totals: StepTotals) -> AttemptTimes:
        """Returns the times of the attempt since the first token."""
        return AttemptTimes(
            decode=now - self.first_at,
            prompts=totals.prompts - self.first_prompts,
            sequences=totals.sequences - self.first_sequences,
            preempted=self.preempted,
        )
