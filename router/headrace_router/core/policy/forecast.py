"""Seconds that a request takes on each of several replicas, from the step models that these have fitted themselves.

Seconds until KV blocks of another replica have arrived, from the transfers that each pair has measured.

For a pair without recent transfers the fastest of the target's other pairs counts, or a guess: the first transfer shows
its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from headrace_router.core.policy.interface import Candidate, Column, Tokens, View

GUESS_SECONDS = 0.001  # per token of a prompt, until any replica has computed some
FITTED = 0.5
MEDIAN_OF = 128  # a median over very many candidates reads about so many of them

GROWN = 0.5  # share of its answer that a running request still has to store, on average
HORIZON_SECONDS = 3.0  # limit of the delay of one request by another


def context_tokens(tokens: int, missing: Column, steps: Column) -> Column:
    """KV tokens that so many steps read which compute a prompt's missing tokens, the same number in each."""
    return steps * (tokens - missing) + missing * (steps + 1) / 2


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The step models of all candidates.

    A replica that has computed little has fitted some coefficients only, and the others are near 0: below FITTED of
    what half of the replicas have, that counts instead. Otherwise it would seem faster than those that have worked.
    """

    base: Column
    per_prefill_token: Column
    per_decode_sequence: Column
    per_kv_token: Column
    error: Column

    @classmethod
    def of(cls, view: View, others: View | None = None) -> "StepCosts":
        """others: of the same model; their fastest rate counts if none of these has computed a prompt."""

        def median(name: str, guess: float = 0.0) -> float:
            column = view.of(name)
            known = column[column > 0]
            return _middle(known[:: max(1, len(known) // MEDIAN_OF)]) if len(known) else guess

        def fitted(name: str, guess: float = 0.0) -> Column:
            return above(view.of(name), median(name, guess))

        def above(column: Column, middle: float) -> Column:
            return np.where(column < FITTED * middle, middle, column)

        base, middle = fitted("base"), median("per_kv_token")
        per_kv_token = above(view.of("per_kv_token"), middle)
        # Where steps computed prompts only, the rest of their time was taken for the time of reading their KV tokens.
        per_kv_token = np.where(view.of("base") < base, np.minimum(per_kv_token, middle), per_kv_token)
        return cls(
            base,
            fitted("per_prefill_token", _fastest_rate(others) or GUESS_SECONDS),
            fitted("per_decode_sequence"),
            per_kv_token,
            view.of("error"),
        )

    def at(self, places: Sequence[int]) -> "StepCosts":
        """The costs of some of the candidates."""
        return StepCosts(
            self.base[places],
            self.per_prefill_token[places],
            self.per_decode_sequence[places],
            self.per_kv_token[places],
            self.error[places],
        )

    def decode(self, sequences: Column, kv_tokens: Column) -> Column:
        """A step without prompts."""
        seconds: Column = self.base + self.per_decode_sequence * sequences + self.per_kv_token * kv_tokens
        return seconds


@dataclass(frozen=True)
class Forecast:
    """The forecast of a request with a prompt of so many tokens and an answer of so many more, on each candidate."""

    view: View
    costs: StepCosts
    tokens: int
    answer: float
    reused: float = 0.0  # see Work

    def at(self, places: Sequence[int]) -> "Forecast":
        """The same of some of the candidates. Columns that are computed already are taken over."""
        few = replace(self, view=self.view.at(places), costs=self.costs.at(places))
        for name, column in vars(self).items():
            if isinstance(column, np.ndarray):
                vars(few)[name] = column[places]
        return few

    @cached_property
    def sequences(self) -> Column:
        """That decode beside it."""
        view = self.view
        most = np.where(view.of("rows") > 0, view.of("rows"), np.inf)
        waiting = np.where(self.short_of_memory, 0.0, view.of("waiting") + view.of("unreported"))
        return np.minimum(view.of("running") + waiting, most)

    @cached_property
    def short_of_memory(self) -> NDArray[np.bool_]:
        """Whether those that wait there, wait for the end of others."""
        free = self.view.of("free_tokens")
        return (free > 0) & (self.view.of("queued_tokens") + self.tokens > free)

    @cached_property
    def step(self) -> Column:
        """Seconds of a decode step, as it is now."""
        return self.costs.decode(self.sequences, self.view.of("kv_tokens"))

    @cached_property
    def requests(self) -> Column:
        """That run there, wait, or were sent."""
        return self.view.requests

    @property
    def next_step(self) -> Column:
        """With the prompts that wait."""
        queued = np.minimum(self.view.of("queued_tokens"), self._step_tokens)
        seconds: Column = queued * self.costs.per_prefill_token + self.step
        return seconds

    def queue(self, missing: Column) -> Column:
        """Until the prompts before this one are computed, and there is a row and memory for it."""
        view, costs = self.view, self.costs
        step = self.step
        queued = view.of("queued_tokens")
        seconds = queued * costs.per_prefill_token + self._steps(queued) * step
        life = self.answer * step  # seconds that a running request takes
        rows = view.of("rows")
        ahead = self.requests - rows + 1
        seconds += np.where((rows > 0) & (ahead > 0), ahead / np.maximum(rows, 1) * life, 0.0)
        free = view.of("free_tokens")
        short = queued + missing + self.answer - free  # blocks that are in its cache may be shared
        used = np.maximum(view.of("kv_tokens"), 1.0)
        seconds += np.where((free > 0) & (short > 0), short / used * life, 0.0)
        return seconds

    def loads(self, offloaded: Tokens, queue: Column) -> tuple[Column, Column]:
        """Seconds until so many tokens of the prompt are loaded, and how many of them are computed instead.

        The replica's own rule: what takes longer than computing, the queue included, is computed.
        """
        if not offloaded.any():
            return np.zeros(len(self.view)), np.zeros(len(self.view))
        rate = self.costs.per_prefill_token
        known = self.view.of("load_token_ms") / 1e3
        seconds = offloaded * np.where(known > 0, known, GUESS_SHARE * rate)
        loaded = seconds <= offloaded * rate + queue
        return np.where(loaded, seconds, 0.0), np.where(loaded, 0.0, offloaded)

    def compute(self, missing: Column) -> Column:
        """The prompt itself, of which so many tokens are missing: with the tokens of those that decode."""
        return self._prompt(missing) + (1 + self._steps(missing)) * self.step

    def answer_seconds(self) -> Column:
        """After the first token."""
        return self.answer * (self.step + self._one_more)

    def delay(self, missing: Column, fetched: Column | float = 0.0) -> Column:
        """The delay of all others there, together: they wait for this prompt, then share each step with this request.

        The requests that run are delayed, and as many as wait now will come after this one. What this request stores
        in a full cache, fetched tokens included, replaces what must be computed again for later requests.
        """
        stored = missing + fetched
        again = stored * self._again_per_token + self._preempted(stored) * self.costs.per_prefill_token
        own = self._prompt(missing) + self._answer_of_others
        delay: Column = self.requests * np.minimum(own + again, HORIZON_SECONDS) + again
        return delay

    @cached_property
    def least_delay(self) -> Column:
        """The same, by a request whose prompt is computed elsewhere, without a transfer that replaces blocks."""
        return self.delay(np.ones(len(self.view)))

    def prompt_delay(self, missing: Column) -> Column:
        """The delay of all others there, together, by a prompt that is computed there for another replica."""
        return self.requests * np.minimum(self._prompt(missing), HORIZON_SECONDS)

    def _prompt(self, missing: Column) -> Column:
        """Its own part of the steps that compute it."""
        read = context_tokens(self.tokens, missing, self._steps(missing) + 1)
        own: Column = missing * self.costs.per_prefill_token + read * self.costs.per_kv_token
        return own

    @cached_property
    def _again_per_token(self) -> Column:
        """Seconds to compute what a token replaces in a full cache."""
        return self.view.of("drops") * self.reused * self.costs.per_prefill_token

    @cached_property
    def _answer_of_others(self) -> Column:
        """What the steps of this answer take longer, for each other request."""
        return self.answer * self._one_more

    @cached_property
    def _lacking(self) -> Column:
        """Tokens that do not fit while all grow, without those of this prompt."""
        view = self.view
        free = view.of("free_tokens")
        grown = view.of("queued_tokens") + self.answer + GROWN * view.of("running") * self.answer
        return np.where(free > 0, grown - free, -np.inf)

    def _preempted(self, missing: Column) -> Column:
        """Tokens of running requests that lose their place in a full cache while all grow, and are computed again."""
        return np.minimum(np.maximum(self._lacking + missing, 0.0), self.tokens + self.answer)

    @cached_property
    def _one_more(self) -> Column:
        """What a step takes longer with this request in it."""
        more: Column = self.costs.per_decode_sequence + self.costs.per_kv_token * (self.tokens + self.answer / 2)
        return more

    def _steps(self, tokens: Column) -> Column:
        """Full steps that so many tokens take."""
        return np.floor(tokens / self._step_tokens)

    @cached_property
    def _step_tokens(self) -> Column:
        most = self.view.of("step_tokens")
        return np.where(most > 0, most, np.inf)


def _fastest_rate(view: View | None) -> float:
    """Seconds per token of a prompt; 0 = not known."""
    rates = view.of("per_prefill_token") if view is not None else np.zeros(0)
    return float(rates[rates > 0].min(initial=np.inf)) if rates.any() else 0.0


def _middle(values: Column) -> float:
    """About half of them are greater, and half of them less."""
    half = len(values) // 2
    return float(np.partition(values, half)[half])


TRANSFER_SECONDS = 0.005  # the fetch request, and the transfer of the last layer
GUESS_SHARE = 0.1  # fetch time / time to compute the same tokens, until the target has fetched from any source


class PairSpeeds:
    """The transfer speeds of one target with each other replica."""

    def __init__(self, target: Candidate) -> None:
        self._known = {speed.address: speed.per_token_ms / 1e3 for speed in target.load.sources}
        self._fastest = min(self._known.values(), default=0.0)

    def per_token(self, peer: Candidate) -> float:
        """Seconds; 0 = not known."""
        return self._known.get(peer.address, self._fastest)


def transfer_seconds(target: Candidate, sources: View, tokens: int, computed: Column) -> Column:
    """That a prompt arrives at the target after each source has computed it, which takes so many seconds.

    Layers are sent while the next ones are computed.
    """
    speeds = PairSpeeds(target)
    known = np.array([speeds.per_token(source) for source in sources.candidates])
    more: Column = np.where(known > 0, np.maximum(tokens * known - computed, 0.0), computed * GUESS_SHARE)
    return more + TRANSFER_SECONDS


def fetch_seconds(target: Candidate, holder: Candidate, tokens: int, per_prefill_token: float) -> float:
    """Seconds to fetch so many cached tokens. per_prefill_token: seconds of the target."""
    per_token = PairSpeeds(target).per_token(holder) or GUESS_SHARE * per_prefill_token
    return TRANSFER_SECONDS + tokens * per_token
