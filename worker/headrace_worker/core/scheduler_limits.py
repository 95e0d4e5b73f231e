"""What bounds the steps of a scheduler."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """max_num_seqs rows, max_num_batched_tokens positions per step, max_waiting queued requests.

    With `batches` > 1 that many steps are in different pipeline stages at a time. A request is then in only one of
    them, as its next position needs the token sampled at the end, and each step gets an equal share of the requests.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int
    watermark: float = 0.01  # share of the pool that an admission leaves free while other requests run
    batches: int = 1
