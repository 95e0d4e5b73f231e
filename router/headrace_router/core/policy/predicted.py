"""The replica with the lowest predicted cost in seconds, by the replicas' own fitted step models.

    time until the first token:  the prompts that wait there, then the part of this one that is not in its cache, in
                                 steps that also compute the tokens of the streams that run there; and its turn for a
                                 row, if all are taken
    time of the answer:          its tokens, in steps with one sequence more
    delay of others:             the streams that run there wait for the prompt, and then for one sequence more

Seconds of this request and of the others count the same, each up to a horizon: no weights are set. What was sent and is
not in a replica's report yet counts as queued. A hot prefix spreads by itself: where it is cached the queue grows until
another replica is faster without it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace_proto.replica_pb2 import StepModel
from headrace_router.core.policy.interface import Candidate, Policy, Work

ANSWER_TOKENS = 128  # assumed of an answer, and left of each running one
HORIZON_SECONDS = 10.0  # of one request's delay
GUESS_SECONDS = 0.001  # per token of a prompt, until any replica has computed some


@dataclass(frozen=True, slots=True)
class Prediction:
    """For one request on one replica, in seconds."""

    first_token: float
    answer: float  # after the first token
    delay: float  # of all others together

    @property
    def cost(self) -> float:
        return self.first_token + self.answer + self.delay


class Predicted(Policy):
    """Replicas count as equal if their costs differ by less than the predictions err.

    Of these the one with most of the prompt in its cache is chosen; with as much of it, they take turns: otherwise the
    one whose last steps happened to be the fastest would get all requests of an idle cluster.
    """

    uses_cache = True

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, candidates: Sequence[Candidate], work: Work) -> int:
        self._turn += 1
        count = len(candidates)
        per_token = prefill_seconds(candidates)
        answer = min(work.request.sampling.max_tokens or ANSWER_TOKENS, ANSWER_TOKENS)

        costs = [
            predict(candidate, max(1, work.tokens - cached), work.tokens, answer, per_token).cost
            for candidate, cached in zip(candidates, work.cached, strict=True)
        ]
        errors = [candidate.load.step_model.error_ms / 1e3 for candidate in candidates]
        best = min(range(count), key=costs.__getitem__)
        equal = [index for index in range(count) if costs[index] - errors[index] <= costs[best] + errors[best]]
        return min(equal, key=lambda index: (-work.cached[index], (index - self._turn) % count))


def prefill_seconds(candidates: Sequence[Candidate]) -> float:
    """Per token of a prompt, for replicas that have computed none: the fastest known rate."""
    known = [rate for one in candidates if (rate := one.load.step_model.per_prefill_token_ms) > 0]
    return min(known) / 1e3 if known else GUESS_SECONDS


def predict(candidate: Candidate, missing: int, tokens: int, answer: int, per_token: float) -> Prediction:
    """missing: tokens to compute of `tokens`. answer: tokens that follow. per_token: seconds, if it knows none."""
    load = candidate.load
    model: StepModel = load.step_model
    rate = model.per_prefill_token_ms / 1e3 or per_token
    ahead = load.waiting + candidate.unreported
    sequences = load.running + ahead
    decoding = (
        model.base_ms + model.per_decode_sequence_ms * sequences + model.per_kv_token_ms * candidate.kv_tokens
    ) / 1e3
    one_more = (model.per_decode_sequence_ms + model.per_kv_token_ms * (tokens + answer / 2)) / 1e3

    queue = load.waiting_tokens + candidate.unreported_tokens
    steps = 1 + (queue + missing) // candidate.step_tokens if candidate.step_tokens else 1
    own = missing * rate
    first_token = queue * rate + own + steps * decoding
    if candidate.rows and sequences >= candidate.rows:
        # Each of those before it, and then this one, waits for an answer to end; `rows` of them end per answer.
        first_token += (sequences - candidate.rows + 1) / candidate.rows * ANSWER_TOKENS * decoding
    delay_by_answer = min(answer, ANSWER_TOKENS) * one_more
    delay = sequences * min(own + delay_by_answer, HORIZON_SECONDS)
    return Prediction(first_token, answer * (decoding + one_more), delay)
