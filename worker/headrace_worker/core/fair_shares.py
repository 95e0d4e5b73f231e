"""How the tokens of a step are divided among the prompts of several tenants."""

from collections import Counter
from collections.abc import Sequence


def divide_budget(missing: Sequence[tuple[bytes, int]], budget: int, waiting: frozenset[bytes]) -> list[int]:
    """Positions to compute of each prompt: equal shares of the budget per tenant, in order within one.

    missing: tenant and missing positions of each prompt. What a tenant does not need is divided among the others.
    waiting: tenants whose shares remain in the budget, for requests that are not admitted yet.
    """
    needs: Counter[bytes] = Counter()
    for tenant, count in missing:
        needs[tenant] += count
    parts = len(needs.keys() | waiting)
    shares: dict[bytes, int] = {}
    for tenant in sorted(needs, key=lambda tenant: needs[tenant]):
        shares[tenant] = min(needs[tenant], -(-budget // parts))
        budget -= shares[tenant]
        parts -= 1
    counts: list[int] = []
    for tenant, count in missing:
        counts.append(min(count, shares[tenant]))
        shares[tenant] -= counts[-1]
    return counts
