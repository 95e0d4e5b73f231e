"""The time of one request, divided into causes that add up to it. Pure: all times are passed in.

A request is in one phase at any time. A phase at a replica is divided when it ends (`split.py`). Of several choices the
first one is followed; what the others take after its end is a cause of its own.
"""

from collections.abc import Callable
from enum import Enum
from typing import Any

from headrace_proto.replica_pb2 import AttemptTimes
from headrace_router.core.account import split
from headrace_router.core.account.cause import Cause
from headrace_router.core.decision import Decision

MAX_DECISIONS = 4  # the first and the last ones


class _Phase(Enum):
    """At a replica; others are causes."""

    PROMPT = "prompt"
    ANSWER = "answer"


class TimeAccount:
    """Seconds on one monotonic clock."""

    def __init__(self, request_id: str, now: float) -> None:
        """request_id: as the client gets it. Begins with admission."""
        self.request_id = request_id
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
        self.ahead_tokens = 0  # of prompts, computed there while it waited
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
            self._add(split.of_prompt(seconds, queued, times, slowness))
            self._since = now
            if times is not None:
                self.ahead, self.ahead_tokens = times.ahead, times.ahead_tokens
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
            self._add(split.of_answer(now - self._since, times, slowness))
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
        """Of the current phase; at a replica without that replica's times, which come at the end of the phase."""
        if isinstance(self._phase, Cause):
            return self._phase
        return Cause.DECODE if self._phase is _Phase.ANSWER else Cause.QUEUE

    def _count_tokens(self) -> None:
        if self._progress is not None:
            self.output_tokens, self.cached_tokens = self._progress()

    def _add(self, parts: dict[Cause, float]) -> None:
        for cause, seconds in parts.items():
            self.parts[cause] = self.parts.get(cause, 0.0) + seconds
