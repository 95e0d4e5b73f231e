"""Each replica in turn, whatever its load: the baseline that other policies are compared with."""

from collections.abc import Sequence

from headrace_router.core.policy.interface import Candidate, Policy, Work


class RoundRobin(Policy):
    def __init__(self) -> None:
        self._turn = -1

    def choose(self, candidates: Sequence[Candidate], work: Work) -> int:
        self._turn += 1
        return self._turn % len(candidates)
