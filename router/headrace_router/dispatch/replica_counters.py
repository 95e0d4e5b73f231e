"""Monotonic replica counters, although each restart of a replica counts from zero."""

from functools import reduce

from headrace_proto.replica_pb2 import Counters
from headrace_router.dispatch.replica_metrics import COUNTERS

Totals = tuple[float, ...]
MAX_BOOTS = 8  # of one replica at the same time


class ReplicaCounters:
    """Sums the counters of a replica over the boots that this router has observed.

    Two boots may count at the same time: during a rolling update a replica has an old and a new build.
    """

    def __init__(self) -> None:
        self._ended: dict[tuple[str, str], Totals] = {}
        self._boots: dict[tuple[str, str], dict[bytes, Totals]] = {}  # by boot id, last seen last

    def totals(self, replica: tuple[str, str], boot_id: bytes, counters: Counters) -> Totals:
        """Over all boots, in the order of `COUNTERS`."""
        now = tuple(getattr(counters, counter.field) for counter in COUNTERS)
        boots = self._boots.setdefault(replica, {})
        ended = self._ended.get(replica, (0,) * len(now))
        last = boots.pop(boot_id, now)
        if any(a < b for a, b in zip(now, last, strict=True)):
            ended = _sum(ended, last)
        boots[boot_id] = now
        if len(boots) > MAX_BOOTS:  # the one that was seen longest ago has ended
            ended = _sum(ended, boots.pop(next(iter(boots))))
        self._ended[replica] = ended
        return reduce(_sum, boots.values(), ended)


def _sum(a: Totals, b: Totals) -> Totals:
    return tuple(x + y for x, y in zip(a, b, strict=True))
