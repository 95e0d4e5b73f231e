"""NVIDIA Dynamo's KV router with its defaults: the lowest weighted sum of blocks.

Source: Dynamo's documentation, "KV Router": the cost of a worker is the prefill blocks to compute there, times a weight
of 1.0, plus its active decode blocks; the lowest cost wins (temperature 0). Events of the caches are exact, as here.
"""

from headrace_router.core.policy.interface import View, Work, first_after
from headrace_router.core.policy.simple import ChosenTarget

OVERLAP_WEIGHT = 1.0
BLOCK = 64  # tokens


class OverlapCost(ChosenTarget):
    """Blocks instead of seconds."""

    uses_cache = True

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, view: View, work: Work) -> int:
        self._turn += 1
        prefill = work.tokens - work.cached + view.of("queued_tokens")
        cost = (OVERLAP_WEIGHT * prefill + view.of("kv_tokens")) // BLOCK
        return first_after(cost == cost.min(), self._turn)
