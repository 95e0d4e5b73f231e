"""A request at whose run processes were lost: whether it may run, and how. Pure.

lost processes   its choices
1                run one at a time, until one of them has passed a trial: TRIAL_TOKENS new tokens
2                do so where nothing else runs
3                are refused, if one of them was lost while a choice ran there alone; else, if a trial was passed
                 before, the next one is a whole answer

An answer that is complete before it has TRIAL_TOKENS passes if it is as long as the longest one at a loss.

Several processes may be lost at once for another reason, or one later, while many choices run: that leads to a trial,
not to a refusal. A choice that ends processes is refused after the third loss, or after the fourth one if it does so
after more than TRIAL_TOKENS. A process that was lost while several of the choices ran there counts once; it does not
count when it makes steps again, or when all choices that ran there are complete.
"""

from dataclasses import dataclass, field
from typing import Any

from headrace_router.core.replica_state import ReplicaState

SUSPECT_LOSSES = 2  # a request that was present at so many runs alone


@dataclass(slots=True)
class Loss:
    """The loss of one process."""

    replica: ReplicaState[Any]
    progress: tuple[bytes, int]  # at that time
    present: set[object] = field(default_factory=set)  # choices that ran there and are not complete
    alone: bool = False  # a choice ran there alone


@dataclass(slots=True)
class Suspect:
    """All choices of one router that have the same fingerprint. A choice is any object of the caller's."""

    until: float = 0.0  # it is forgotten then
    trial: object = None  # the choice whose trial runs
    whole: bool = False  # a trial is a whole answer: one of TRIAL_TOKENS has proved too little
    reach: int = 0  # output tokens of the longest answer at which a process was lost: a shorter one proves nothing
    _losses: dict[tuple[str, int, bytes], Loss] = field(default_factory=dict)  # by build and process
    _passed: bool = False  # a trial, since the last loss

    @property
    def losses(self) -> int:
        return len(self._losses)

    @property
    def refused(self) -> bool:
        return self.losses > SUSPECT_LOSSES and any(loss.alone for loss in self._losses.values())

    @property
    def alone(self) -> bool:
        """Whether the next attempt must run where nothing else runs."""
        return self.losses >= SUSPECT_LOSSES and not self._passed

    def must_wait(self, *, urgent: bool) -> bool:
        """Whether the trial of another choice decides. urgent: one beside others is not waited for any longer."""
        return self.trial is not None and (self.alone or not urgent)

    def add(self, replica: ReplicaState[Any], choice: object, output_tokens: int, *, alone: bool) -> None:
        """The process was lost while the choice ran there, and had so many tokens."""
        loss = self._losses.get(key := (*replica.build, replica.progress[0]))
        if loss is None:
            loss = self._losses[key] = Loss(replica, replica.progress)
            self.whole = self.whole or (self._passed and self.losses > SUSPECT_LOSSES)
            self._passed = False
        loss.progress = replica.progress
        loss.present.add(choice)
        loss.alone = loss.alone or alone
        self.reach = max(self.reach, output_tokens)

    def start_trial(self, choice: object) -> bool:
        """Whether this attempt of the choice is the trial."""
        if self._passed or self.trial is not None:
            return False
        self.trial = choice
        return True

    def end_trial(self, *, passed: bool, alone: bool) -> None:
        """alone: it ran alone; beside others it proves nothing after the second loss."""
        self.trial = None
        self._passed = self._passed or (passed and (alone or not self.alone))

    def complete(self, choice: object) -> None:
        """The choice has its whole answer: it did not cause the losses that it was present at."""
        for loss in self._losses.values():
            loss.present.discard(choice)
        self._losses = {key: loss for key, loss in self._losses.items() if loss.present}

    def take_back_losses(self) -> None:
        """A process that was paused, overloaded or cut off, and makes steps again, was not killed."""
        self._losses = {
            key: loss for key, loss in self._losses.items() if not loss.replica.has_stepped_since(loss.progress)
        }
