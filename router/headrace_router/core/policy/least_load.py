"""The replica with the fewest requests."""

from collections.abc import Sequence

from headrace_router.core.policy.interface import Candidate, Policy, Work


class LeastLoad(Policy):
    """Fewest requests running, waiting or sent but not reported; then most free KV memory.

    Ties are broken in rotation, so that equal replicas share evenly even when each request ends before the next begins.
    """

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, candidates: Sequence[Candidate], work: Work) -> int:
        self._turn += 1
        count = len(candidates)

        def cost(index: int) -> tuple[int, float, int]:
            candidate = candidates[index]
            load = candidate.load
            requests = load.running + load.waiting + candidate.unreported
            return requests, round(load.kv_usage, 2), (index - self._turn) % count

        return min(range(count), key=cost)
