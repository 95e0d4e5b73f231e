"""Each replica in turn, whatever its load: the baseline that other policies are compared with."""

from headrace_router.core.policy.chosen_target import ChosenTarget
from headrace_router.core.policy.interface import Work
from headrace_router.core.policy.view import View


class RoundRobin(ChosenTarget):
    """Takes turns."""

    def __init__(self) -> None:
        self._turn = -1

    def choose(self, view: View, work: Work) -> int:
        self._turn += 1
        return self._turn % len(view)
