"""The time of one request, divided into causes that add up to it. Pure: all times are passed in.

A request is in one phase at any time. A phase at a replica is divided when it ends (`of_prompt`, `of_answer`). Of
several choices the first one is followed; what the others take after its end is a cause of its own.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, StrEnum
from typing import Any

from headrace_proto.replica_pb2 import AttemptTimes, TokenLogprobs
from headrace_router.core.attempt import Attempt, Outcome
from headrace_router.core.cache_miss import CacheMiss
from headrace_router.core.placement import Decision, Placed
from headrace_router.core.replica_state import ReplicaState


class Cause(StrEnum):
    """What the time of a request is spent on. The values are names in documents; `words` are for people."""

    ADMISSION = "admission"
    TOKENIZER = "tokenizer"
    PLACEMENT = "placement"
    QUEUE = "queue"
    FETCH = "fetch"
    PROMPT = "prompt"
    PROMPT_BESIDE = "prompt_beside"
    DECODE = "decode"
    SEQUENCES_BESIDE = "sequences_beside"
    PROMPTS_BESIDE = "prompts_beside"
    PREEMPTED = "preempted"
    SLOW_REPLICA = "slow_replica"
    MOVED = "moved"
    CLIENT = "client"
    OTHER_CHOICES = "other_choices"
    REST = "rest"

    @property
    def words(self) -> str:
        return _WORDS[self]


_WORDS = {
    Cause.ADMISSION: "reading the body, and waiting for a place among this router's requests",
    Cause.TOKENIZER: "tokenizing the prompt",
    Cause.PLACEMENT: "waiting for a replica",
    Cause.QUEUE: "waiting in the replica's queue",
    Cause.FETCH: "waiting for KV blocks of another replica",
    Cause.PROMPT: "computing the part of the prompt that no cache had",
    Cause.PROMPT_BESIDE: "other work in the steps that computed the prompt",
    Cause.DECODE: "decoding",
    Cause.SEQUENCES_BESIDE: "other streams in the steps of the answer",
    Cause.PROMPTS_BESIDE: "prompts of others in the steps of the answer",
    Cause.PREEMPTED: "without KV memory: preempted, and computed again",
    Cause.SLOW_REPLICA: "a replica slower than its peers",
    Cause.MOVED: "moving to another replica",
    Cause.CLIENT: "waiting for the client to take the answer",
    Cause.OTHER_CHOICES: "other choices of the request",
    Cause.REST: "network, router, and what is not known",
}


SLOW = 1.5  # times as long as its peers' steps: from then on the difference is the replica's


def of_prompt(seconds: float, queued: float, times: AttemptTimes | None, slowness: float) -> dict[Cause, float]:
    """From placement to the first token. queued: seconds until its first step, a fetch included."""
    if times is None:
        return _fitting(seconds, {Cause.QUEUE: queued})
    fetch, preempted = times.fetch_us / 1e6, times.prompt_preempted_us / 1e6
    compute = max(0.0, times.compute_us / 1e6 - preempted)
    steps, slow = _without_slowness(compute, slowness)
    tokens = times.own_tokens + times.beside_tokens
    own = times.own_tokens / tokens if tokens else 1.0
    return _fitting(
        seconds,
        {
            Cause.QUEUE: max(0.0, queued - fetch),
            Cause.FETCH: fetch,
            Cause.PROMPT: steps * own,
            Cause.PROMPT_BESIDE: steps * (1.0 - own),
            Cause.PREEMPTED: preempted,
            Cause.SLOW_REPLICA: slow,
        },
    )


def of_answer(seconds: float, times: AttemptTimes | None, slowness: float) -> dict[Cause, float]:
    """From the first token to the last one."""
    if times is None:
        return {Cause.DECODE: seconds}
    preempted = times.preempted_us / 1e6
    decode = max(0.0, times.decode_us / 1e6 - preempted)
    steps, slow = _without_slowness(decode, slowness)
    part = steps / decode if decode else 0.0
    prompts, sequences = times.prompts_us / 1e6 * part, times.sequences_us / 1e6 * part
    return _fitting(
        seconds,
        {
            Cause.PREEMPTED: preempted,
            Cause.SLOW_REPLICA: slow,
            Cause.PROMPTS_BESIDE: prompts,
            Cause.SEQUENCES_BESIDE: sequences,
            Cause.DECODE: max(0.0, steps - prompts - sequences),
        },
    )


def _without_slowness(seconds: float, slowness: float) -> tuple[float, float]:
    """What its peers would take, and the rest."""
    normal = seconds / slowness if slowness >= SLOW else seconds
    return normal, seconds - normal


def _fitting(seconds: float, parts: Mapping[Cause, float]) -> dict[Cause, float]:
    """The parts and the rest, together as long as measured here: the replica has another clock."""
    total = sum(parts.values())
    scale = seconds / total if total > seconds else 1.0
    fitted = {cause: part * scale for cause, part in parts.items() if part > 0}
    fitted[Cause.REST] = max(0.0, seconds - total * scale)
    return fitted


MAX_DECISIONS = 4  # the first and the last ones


class _Phase(Enum):
    """At a replica; others are causes."""

    PROMPT = "prompt"
    ANSWER = "answer"


class TimeAccount:
    """The time of one request, divided into causes that add up to it; seconds of one monotonic clock."""

    def __init__(self, request_id: str, now: float, answer_id: str = "") -> None:
        """request_id, answer_id: as the client gets them. Begins with admission."""
        self.request_id = request_id
        self.answer_id = answer_id
        self.began = now
        self.ended: float | None = None
        self.first_token: float | None = None  # seconds since the beginning
        self.failed = False
        self.disconnected = False  # the client has ended it
        self.parts: dict[Cause, float] = {}
        self.decisions: list[Decision] = []
        self.prompt_tokens = self.output_tokens = self.cached_tokens = 0
        self.preemptions = 0
        self.ahead = 0  # requests that ran or waited at the replica when it came
        self.ahead_tokens = 0  # prompt tokens that the replica computed while the request waited
        self.snapshot_tokens = 0  # after which it started from a snapshot of recurrent state
        self.covered_tokens = 0  # tokens whose keys and values were cached, of a model with recurrent state
        self.cache_miss: CacheMiss | None = None  # why no more of the prompt was cached
        self._progress: Callable[[], tuple[int, int]] | None = None
        self._phase: Cause | _Phase = Cause.ADMISSION
        self._since = now

    def enter(self, cause: Cause, now: float) -> None:
        """From now on time is of this cause."""
        self._leave(now)
        self._phase = cause

    def begin(self, prompt_tokens: int, progress: Callable[[], tuple[int, int]], now: float) -> None:
        """It waits for a replica. progress: tokens of its answers so far, and cached ones of its prompts."""
        self.prompt_tokens, self._progress = prompt_tokens, progress
        self.enter(Cause.PLACEMENT, now)

    def placed(self, decision: Decision | None, now: float) -> None:
        """An attempt begins."""
        if decision is not None:
            if len(self.decisions) == MAX_DECISIONS:
                del self.decisions[-1]
            self.decisions.append(decision)
        if self.first_token is None:
            self._leave(now)
            self._phase = _Phase.PROMPT

    def tokens(
        self, now: float, *, queued: float = 0.0, times: AttemptTimes | None = None, slowness: float = 1.0
    ) -> None:
        """An attempt has sent its first tokens. times: of the prompt, if the replica reports them."""
        if self.first_token is None:
            self.first_token = now - self.began
            seconds = now - self._since
            self._add(of_prompt(seconds, queued, times, slowness))
            self._since = now
            if times is not None:
                self.ahead, self.ahead_tokens = times.ahead, times.ahead_tokens
                self.snapshot_tokens, self.covered_tokens = times.snapshot_tokens, times.covered_tokens
        else:
            self._leave(now)
        self._phase = _Phase.ANSWER

    def left(self, now: float) -> None:
        """The attempt was refused, lost or moved: another one follows."""
        if self._phase is _Phase.PROMPT:  # what it did there is done again
            self._phase = Cause.MOVED
        self.enter(Cause.MOVED, now)

    def answered(
        self, now: float, *, times: AttemptTimes | None = None, slowness: float = 1.0, preemptions: int = 0
    ) -> None:
        """The answer is complete. times, preemptions: of the attempt that completed it."""
        self.preemptions = preemptions
        if self._phase is _Phase.ANSWER:
            self._add(of_answer(now - self._since, times, slowness))
            self._since = now
        self.enter(Cause.OTHER_CHOICES, now)

    def finish(self, now: float, *, failed: bool = False, disconnected: bool = False) -> None:
        """The client has the whole answer, or an error, or has disconnected. Later calls change nothing."""
        if self.ended is None:
            self._leave(now)
            self.ended, self.failed, self.disconnected = now, failed, disconnected
            self._count_tokens()
            self._progress = None  # and what it refers to

    def ranked(self, now: float | None = None) -> list[tuple[Cause, float]]:
        """Causes by their time, the largest first; decoding, which no other request or fault extends, is last.

        now: of a running request, whose current phase counts until then.
        """
        parts = dict(self.parts)
        if self.ended is None and now is not None:
            cause = self._cause
            parts[cause] = parts.get(cause, 0.0) + now - self._since
        found = [(cause, seconds) for cause, seconds in parts.items() if seconds > 0]
        return sorted(found, key=lambda entry: (entry[0] is Cause.DECODE, -entry[1]))

    def document(self, now: float) -> dict[str, Any]:
        """As JSON, for `headrace explain`."""
        self._count_tokens()
        return {
            "request": self.request_id,
            "seconds": (now if self.ended is None else self.ended) - self.began,
            "first_token": self.first_token,
            "running": self.ended is None,
            "failed": self.failed,
            "disconnected": self.disconnected,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "preemptions": self.preemptions,
            "ahead": self.ahead,
            "ahead_tokens": self.ahead_tokens,
            "snapshot_tokens": self.snapshot_tokens,
            "covered_tokens": self.covered_tokens,
            "cache_miss": self.cache_miss.document() if self.cache_miss is not None else None,
            "causes": [{"cause": cause, "words": cause.words, "seconds": part} for cause, part in self.ranked(now)],
            "decisions": [decision.document() for decision in self.decisions],
        }

    def _leave(self, now: float) -> None:
        if self.ended is not None:
            return
        self._add({self._cause: now - self._since})
        self._since = now

    @property
    def _cause(self) -> Cause:
        """The cause of the current phase; at a replica, without the replica's times, which come when the phase ends."""
        if isinstance(self._phase, Cause):
            return self._phase
        return Cause.DECODE if self._phase is _Phase.ANSWER else Cause.QUEUE

    def _count_tokens(self) -> None:
        if self._progress is not None:
            self.output_tokens, self.cached_tokens = self._progress()

    def _add(self, parts: dict[Cause, float]) -> None:
        for cause, seconds in parts.items():
            self.parts[cause] = self.parts.get(cause, 0.0) + seconds


KEPT = 4000  # requests; an account has about 2.4 KiB, 4.1 KiB at most


_API = re.compile(r"^(?:chatcmpl-|cmpl-|msg_|resp_)")


class AccountTable:
    """The accounts of the newest requests, by request id and by the id of the answer."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._ids: dict[TimeAccount, tuple[str, str]] = {}  # the oldest first
        self._by_id: dict[str, list[TimeAccount]] = {}  # clients choose request ids: several may have the same

    def open(self, request_id: str, answer_id: str, now: float) -> TimeAccount:
        """A new account, kept until so many newer ones have been opened."""
        account = TimeAccount(request_id, now, answer_id)
        self._ids[account] = request_id, answer_id
        for name in (request_id, answer_id):
            self._by_id.setdefault(name, []).append(account)
        if len(self._ids) > self._kept:
            self.discard(next(iter(self._ids)))
        return account

    def discard(self, account: TimeAccount) -> None:
        """Removes the account of a request that was refused before placement: refusals displace no other accounts."""
        for name in self._ids.pop(account, ()):
            self._by_id[name].remove(account)
            if not self._by_id[name]:
                del self._by_id[name]

    def get(self, name: str) -> TimeAccount | None:
        """name: a request's id, or that of its answer, which begins with the name of its API."""
        named = self._by_id.get(name) or self._by_id.get(_API.sub("", name))
        return named[-1] if named else None

    def __len__(self) -> int:
        return len(self._ids)


class Recorder:
    """A `RunListener` that writes what the run of a choice reports into the account of its request."""

    def __init__(self, account: TimeAccount, clock: Callable[[], float]) -> None:
        self._account = account
        self._clock = clock
        self._replica: ReplicaState[Any] | None = None
        self._started = False  # the attempt has sent tokens

    def placed(self, placed: Placed[Any]) -> None:
        self._replica, self._started = placed.replica, False
        self._account.placed(placed.decision, self._clock())

    def add_tokens(
        self, attempt: Attempt, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], finish: int, error: str
    ) -> None:
        if token_ids and not self._started:
            self._started = True
            queued = attempt.queue_seconds or 0.0
            self._account.tokens(self._clock(), queued=queued, times=attempt.times, slowness=self._slowness)

    def left(self, replica_id: str, outcome: Outcome, begun: bool) -> None:
        self._account.left(self._clock())

    def ended(self, attempt: Attempt | None, failure: Exception | None) -> None:
        times, preemptions = (attempt.times, attempt.preemptions) if attempt is not None else (None, 0)
        self._account.answered(self._clock(), times=times, slowness=self._slowness, preemptions=preemptions)

    @property
    def _slowness(self) -> float:
        """How many times as long as its peers' the replica's steps take."""
        return self._replica.speed.slowness if self._replica is not None else 1.0
