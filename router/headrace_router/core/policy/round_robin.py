"""Each replica in turn, whatever its load: the baseline that other policies are compared with."""

from collections.abc import Sequence

from headrace_router.core.choice_request import ChoiceRequest
from headrace_router.core.policy.interface import Candidate, Policy


class RoundRobin(Policy):
    def __init__(self) -> None:
        self._turn = -1

    def choose(self, candidates: Sequence[Candidate], request: ChoiceRequest, output_tokens: int) -> int:
        self._turn += 1
        return self._turn % len(candidates)
