"""What the scheduler counts."""

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerCounters:
    """Monotonic counts for metrics."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
