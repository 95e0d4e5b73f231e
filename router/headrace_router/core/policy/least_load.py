"""The replica with the fewest requests."""

import numpy as np

from headrace_router.core.policy.chosen_target import ChosenTarget
from headrace_router.core.policy.interface import Work, first_after
from headrace_router.core.policy.view import View


class LeastLoad(ChosenTarget):
    """Fewest requests running, waiting or sent but not reported; then most free KV memory.

    Ties are broken in rotation, so that equal replicas share evenly even when each request ends before the next begins.
    """

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, view: View, work: Work) -> int:
        self._turn += 1
        cost = view.requests + np.minimum(np.round(view.of("kv_usage"), 2), 0.99)
        return first_after(cost == cost.min(), self._turn)
