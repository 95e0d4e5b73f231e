"""Counters of the scheduler."""

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerCounters:
    """Monotonic counts for metrics."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0  # tokens
    prefix_hits: int = 0  # tokens
    preemptions: int = 0
    not_finite: int = 0  # attempts that ended since their logits were not finite

    def count_lookup(self, tokens: int, found: int) -> None:
        """Counts a lookup of a request's tokens in this replica's prefix cache."""
        self.prefix_queries += tokens
        self.prefix_hits += found
