"""The replicas that were lost while one choice ran there, and its trials after them: pure."""

from functools import cached_property
from typing import Generic

from headrace_proto.trial import TRIAL_SECONDS, TRIAL_TOKENS, WHOLE_ANSWER
from headrace_router.core.choice_request import ChoiceRequest
from headrace_router.core.replica_state import C, ReplicaState
from headrace_router.core.suspect import Suspect
from headrace_router.core.suspect_table import SuspectTable, fingerprint


class ChoiceLosses(Generic[C]):
    """Counts in the table of suspects, together with all choices that have the same fingerprint."""

    def __init__(self, suspects: SuspectTable, request: ChoiceRequest) -> None:
        self._suspects = suspects
        self._request = request
        self._choice = object()  # what the table keeps of this choice: not its prompt
        self._trial: Suspect | None = None  # whose trial the running attempt is
        self._trial_end: int | None = None  # output tokens after which others may run
        self._alone_until = 0.0
        self._ran_alone = False  # the last attempt, at its end
        self._isolated: tuple[ReplicaState[C], bytes] | None = None  # where the running attempt is alone, and its id

    @property
    def any(self) -> bool:
        return self._find() is not None

    @property
    def alone(self) -> bool:
        """Whether the next attempt must run where nothing else runs."""
        suspect = self._find()
        return suspect is not None and suspect.alone

    @property
    def trial_tokens(self) -> int:
        """New tokens of an attempt that runs alone after which others may run beside it."""
        suspect = self._find()
        return WHOLE_ANSWER if suspect is not None and suspect.whole else TRIAL_TOKENS

    def check(self) -> None:
        """Raises PoisonousRequestError if the request is refused now."""
        if self._suspects:
            self._suspects.check(self._fingerprint)

    def must_wait(self, *, urgent: bool) -> bool:
        """Whether the trial of another choice with this fingerprint decides. urgent: half of the patience is over."""
        suspect = self._find()
        return suspect is not None and suspect.must_wait(urgent=urgent)

    def add(self, replica: ReplicaState[C], output_tokens: int) -> None:
        """The replica failed while the choice ran there, and had so many tokens."""
        self._suspects.add(self._fingerprint, replica, self._choice, output_tokens, alone=self._ran_alone)

    def start(
        self, replica: ReplicaState[C], attempt_id: bytes, output_tokens: int, *, alone: bool, now: float
    ) -> None:
        """An attempt starts: the trial, if one is needed and none runs."""
        suspect = self._find()
        if suspect is not None and suspect.start_trial(self._choice):
            self._trial = suspect
        if alone:
            replica.reservation.begin(attempt_id)
            self._isolated = replica, attempt_id
            self._alone_until = now + TRIAL_SECONDS
        if alone or self._trial is not None:
            self._trial_end = output_tokens + self.trial_tokens

    def receive(self, output_tokens: int, now: float) -> None:
        """The attempt has produced tokens."""
        if self._trial_end is not None and output_tokens >= self._trial_end:
            self._end_trial(passed=True)
        elif self._isolated is not None and now >= self._alone_until:
            self._end_trial(passed=False)

    def end_attempt(self, output_tokens: int = 0, *, complete: bool = False) -> None:
        """It has ended. Idempotent. complete: with the whole answer."""
        self._end_trial(passed=complete and self._trial is not None and output_tokens >= self._trial.reach)

    def complete(self) -> None:
        """The choice has its whole answer."""
        suspect = self._find()
        if suspect is not None:
            suspect.complete(self._choice)

    def _end_trial(self, *, passed: bool) -> None:
        self._ran_alone = self._isolated is not None
        if self._trial is not None:
            self._trial.end_trial(passed=passed, alone=self._ran_alone)
        if self._isolated is not None:
            replica, attempt_id = self._isolated
            replica.reservation.end(attempt_id)
        self._trial = self._isolated = self._trial_end = None

    def _find(self) -> Suspect | None:
        return self._suspects.find(self._fingerprint) if self._suspects else None

    @cached_property
    def _fingerprint(self) -> bytes:
        return fingerprint(self._request)
