"""The replicas that were lost while one choice ran there, and its trials after them (I25): pure."""

from functools import cached_property
from typing import Generic

from headrace_proto.trial import TRIAL_TOKENS
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
        self._ran_alone = False  # the last attempt, at its start
        self._isolated: tuple[ReplicaState[C], bytes] | None = None  # where the running attempt is alone, and its id

    @property
    def any(self) -> bool:
        return self._find() is not None

    @property
    def alone(self) -> bool:
        """Whether the next attempt must run where nothing else runs."""
        suspect = self._find()
        return suspect is not None and suspect.alone

    def check(self) -> None:
        """Raises PoisonousRequestError if the request is refused now."""
        if self._suspects:
            self._suspects.check(self._fingerprint)

    def must_wait(self, *, urgent: bool) -> bool:
        """Whether the trial of another choice with this fingerprint decides. urgent: half of the patience is over."""
        suspect = self._find()
        return suspect is not None and suspect.must_wait(urgent=urgent)

    def add(self, replica: ReplicaState[C]) -> None:
        """The replica failed while the choice ran there."""
        self._suspects.add(self._fingerprint, replica, self._choice, alone=self._ran_alone)

    def start(self, replica: ReplicaState[C], attempt_id: bytes, output_tokens: int, *, alone: bool) -> None:
        """An attempt starts: the trial, if one is needed and none runs."""
        self._ran_alone = alone
        suspect = self._find()
        if suspect is not None and suspect.start_trial(self._choice):
            self._trial = suspect
        if alone:
            replica.isolated_attempt = attempt_id
            self._isolated = replica, attempt_id
        if alone or self._trial is not None:
            self._trial_end = output_tokens + TRIAL_TOKENS

    def receive(self, output_tokens: int) -> None:
        """The attempt has produced tokens."""
        if self._trial_end is not None and output_tokens >= self._trial_end:
            self.end_attempt(passed=True)

    def end_attempt(self, *, passed: bool = False) -> None:
        """It has ended, or passed its trial. Idempotent."""
        if self._trial is not None:
            self._trial.end_trial(passed=passed, alone=self._isolated is not None)
        if self._isolated is not None:
            replica, attempt_id = self._isolated
            if replica.isolated_attempt == attempt_id:
                replica.isolated_attempt = b""
        self._trial = self._isolated = self._trial_end = None

    def complete(self) -> None:
        """The choice has its whole answer."""
        suspect = self._find()
        if suspect is not None:
            suspect.complete(self._choice)

    def _find(self) -> Suspect | None:
        return self._suspects.find(self._fingerprint) if self._suspects else None

    @cached_property
    def _fingerprint(self) -> bytes:
        return fingerprint(self._request)
