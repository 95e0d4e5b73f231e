"""The policies that a simulation can use: production's, and those of other routers to compare with."""

from collections import OrderedDict
from collections.abc import Sequence

from headrace_cluster.simulator.errors import SimulationError
from headrace_router.core.policy import POLICIES, Policy
from headrace_router.core.policy.interface import PlacementTask, View, first_after
from headrace_router.core.policy.simple import ChosenTarget

OVERLAP_WEIGHT = 1.0
BLOCK = 64  # tokens


class OverlapCost(ChosenTarget):
    """NVIDIA Dynamo's KV router with its defaults: the lowest weighted sum of blocks.

    Source: Dynamo's documentation, "KV Router": the cost of a worker is the prefill blocks to compute there, times a
    weight of 1.0, plus its active decode blocks; the lowest cost wins (temperature 0). Events of the caches are exact,
    as here.
    """

    uses_cache = True

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, view: View, work: PlacementTask) -> int:
        self._turn += 1
        prefill = work.tokens - work.cached + view.of("queued_tokens")
        cost = (OVERLAP_WEIGHT * prefill + view.of("kv_tokens")) // BLOCK
        return first_after(cost == cost.min(), self._turn)


CACHE_THRESHOLD = 0.3
BALANCE_ABS = 64
BALANCE_REL = 1.5
TREE_BLOCKS = 1 << 20


class CacheAware(ChosenTarget):
    """SGLang's router rule `cache_aware`: the longest remembered prefix, unless the load is unbalanced.

    Source: documentation of SGLang's model gateway (docs/getting-started/load-balancing.md of lightseekorg/smg), with
    its defaults cache-threshold 0.3, balance-abs-threshold 64 and balance-rel-threshold 1.5. The router has no events
    of the caches: it remembers the prompts that it sent, in a tree per worker. If the most loaded worker has more than
    64 requests more, and more than 1.5 times as many, as the least loaded one: the least loaded worker. Else the worker
    with the longest common prefix if this is more than 30 % of the prompt, else the worker with the smallest tree.

    Here a tree is the set of the hashes of the blocks that were sent, of which the newest TREE_BLOCKS are kept.
    """

    uses_cache = True  # the hashes of prompts; not what replicas report

    def __init__(self) -> None:
        self._trees: dict[str, OrderedDict[int, None]] = {}

    def choose(self, view: View, work: PlacementTask) -> int:
        loads = view.requests
        least, most = int(loads.argmin()), float(loads.max())
        digests = [digest for blocks in work.request.blocks.values() for digest in blocks.digests.tolist()]
        trees = [self._trees.setdefault(each.replica_id, OrderedDict()) for each in view.candidates]
        if most - loads[least] > BALANCE_ABS and most > BALANCE_REL * loads[least]:
            chosen = least
        else:
            matched = [_matched(tree, digests) for tree in trees]
            chosen = matched.index(max(matched))
            if not digests or matched[chosen] / len(digests) <= CACHE_THRESHOLD:
                chosen = min(range(len(trees)), key=lambda index: len(trees[index]))
        tree = trees[chosen]
        for digest in digests:
            tree[digest] = None
            tree.move_to_end(digest)
        while len(tree) > TREE_BLOCKS:
            tree.popitem(last=False)
        return chosen


def _matched(tree: OrderedDict[int, None], digests: Sequence[int]) -> int:
    return next((index for index, digest in enumerate(digests) if digest not in tree), len(digests))


SIMULATED: dict[str, type[Policy]] = {**POLICIES, "cache-aware": CacheAware, "overlap-cost": OverlapCost}


def new_policy(name: str) -> Policy:
    """A new one. Raises SimulationError."""
    name = name.lower().replace("_", "-")
    if name not in SIMULATED:
        raise SimulationError(f"There is no policy '{name}'; use {', '.join(SIMULATED)}.")
    return SIMULATED[name]()
