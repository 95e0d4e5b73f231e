"""Replica counters that never go back, though each restart of a replica counts from zero."""

from headrace_proto.replica_pb2 import Counters

Totals = tuple[float, ...]


class ReplicaCounters:
    """Adds up the counters of a replica over its boots, as far as this router has seen them."""

    def __init__(self) -> None:
        self._boots: dict[tuple[str, str], tuple[bytes, Totals, Totals]] = {}  # boot id, earlier boots, this boot

    def totals(self, replica: tuple[str, str], boot_id: bytes, counters: Counters) -> Totals:
        """Over all boots: prompt tokens, generated tokens, cache queries, cache hits, preemptions, steps, fetches,
        failed ones, fetched bytes, seconds of fetches, grants."""
        now = (
            counters.prompt_tokens,
            counters.generation_tokens,
            counters.prefix_cache_queries,
            counters.prefix_cache_hits,
            counters.preemptions,
            counters.steps,
            counters.fetches,
            counters.fetches_failed,
            counters.fetched_bytes,
            counters.fetch_seconds,
            counters.grants,
        )
        last_boot, earlier, last = self._boots.get(replica, (boot_id, (0,) * len(now), now))
        if last_boot != boot_id or any(a < b for a, b in zip(now, last, strict=True)):
            earlier = _sum(earlier, last)
        self._boots[replica] = boot_id, earlier, now
        return _sum(earlier, now)


def _sum(a: Totals, b: Totals) -> Totals:
    return tuple(x + y for x, y in zip(a, b, strict=True))
