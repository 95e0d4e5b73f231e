"""Repeats background work that fails unexpectedly: an error of the controller or of Ray stops no replica."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import structlog

from headrace_cluster.core.backoff import Backoff
from headrace_proto.quantities import counted

T = TypeVar("T")

BACKOFF = Backoff(0.2, 30.0)
SHOWN_SECONDS = 60.0  # after its last failure, for a problem to be shown; longer than any pause
STABLE_SECONDS = 60.0  # work that ran for longer than this before it failed starts again with the first pause

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Problem:
    sentence: str
    at: float


class Retries:
    """For one event loop. Times are seconds of `clock`."""

    def __init__(self, clock: Callable[[], float], jitter: Callable[[], float] = random.random) -> None:
        self._clock = clock
        self._jitter = jitter
        self._problems: dict[str, _Problem] = {}

    async def run(self, label: str, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work`, which is repeated until it returns. label: of the work in messages, unique."""
        failures = 0
        while True:
            began = self._clock()
            try:
                result = await work()
            except Exception as error:
                failures = 1 if self._clock() - began > STABLE_SECONDS else failures + 1
                self.note(label, error, failures)
                await asyncio.sleep(BACKOFF.seconds(failures, self._jitter))
            else:
                self._problems.pop(label, None)
                return result

    def note(self, label: str, error: BaseException, failures: int = 1) -> None:
        """Shows a failure for a while, and logs it; the traceback only the first time."""
        often = "" if failures == 1 else f" {counted(failures, 'time')}"
        sentence = f"{label} failed{often} ({type(error).__name__}: {error}) and is repeated"
        log.error(sentence, exc_info=error if failures == 1 else None)
        self._problems[label] = _Problem(sentence, self._clock())

    def forget(self, label: str) -> None:
        """Work that failed has succeeded."""
        self._problems.pop(label, None)

    @property
    def problems(self) -> list[str]:
        """What failed lately, a sentence each."""
        now = self._clock()
        self._problems = {label: entry for label, entry in self._problems.items() if now - entry.at < SHOWN_SECONDS}
        return [entry.sentence for entry in self._problems.values()]
