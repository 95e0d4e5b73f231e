"""Replica counters that never go back, though each restart of a replica counts from zero."""

from headrace_proto.replica_pb2 import Counters

Totals = tuple[int, int, int, int, int, int]


class ReplicaCounters:
    """Adds up the counters of a replica over its boots, as far as this router has seen them."""

    def __init__(self) -> None:
        self._boots: dict[tuple[str, str], tuple[bytes, Totals, Totals]] = {}  # boot id, earlier boots, this boot

    def totals(self, replica: tuple[str, str], boot_id: bytes, counters: Counters) -> Totals:
        """Prompt tokens, generated tokens, cache queries, cache hits, preemptions, steps: over all boots."""
        now = (
            counters.prompt_tokens,
            counters.generation_tokens,
            counters.prefix_cache_queries,
            counters.prefix_cache_hits,
            counters.preemptions,
            counters.steps,
        )
        last_boot, earlier, last = self._boots.get(replica, (boot_id, (0,) * 6, now))
        if last_boot != boot_id or any(a < b for a, b in zip(now, last, strict=True)):
            earlier = _sum(earlier, last)
        self._boots[replica] = boot_id, earlier, now
        return _sum(earlier, now)


def _sum(a: Totals, b: Totals) -> Totals:
    return (a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3], a[4] + b[4], a[5] + b[5])
