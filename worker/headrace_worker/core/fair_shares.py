"""Shares of tenants: of the places in a queue, and of the tokens of a step."""

from collections import Counter
from collections.abc import Sequence


def has_place(capacity: int, count: int, own: int, tenants: int) -> bool:
    """Whether one more of a tenant may enter where `count` of `tenants` are, `own` of them its own.

    Beyond the capacity, and up to twice of it, a tenant may have an equal part: no other one keeps it out.
    """
    if count < capacity:
        return True
    return tenants > 0 and count < 2 * capacity and (not own or own < capacity // tenants)


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
