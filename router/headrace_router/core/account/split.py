"""Divides the time at a replica among causes, from what the replica reports with its tokens."""

from collections.abc import Mapping

from headrace_proto.replica_pb2 import AttemptTimes
from headrace_router.core.account.cause import Cause

SLOW = 1.5  # times as long as its peers' steps: from then on the difference is the replica's


def of_prompt(seconds: float, queued: float, times: AttemptTimes | None, slowness: float) -> dict[Cause, float]:
    """From placement to the first token. queued: seconds until its first step, a fetch included."""
    if times is None:
        return _fitting(seconds, {Cause.QUEUE: queued})
    fetch, preempted = times.fetch_us / 1e6, times.prompt_preempted_us / 1e6
    compute = max(0.0, times.compute_us / 1e6 - preempted)
    steps, slow = _without_slowness(compute, slowness)
    tokens = times.own_tokens + times.beside_tokens
    own = times.own_tokens / tokens if tokens else 1.0
    return _fitting(
        seconds,
        {
            Cause.QUEUE: max(0.0, queued - fetch),
            Cause.FETCH: fetch,
            Cause.PROMPT: steps * own,
            Cause.PROMPT_BESIDE: steps * (1.0 - own),
            Cause.PREEMPTED: preempted,
            Cause.SLOW_REPLICA: slow,
        },
    )


def of_answer(seconds: float, times: AttemptTimes | None, slowness: float) -> dict[Cause, float]:
    """From the first token to the last one."""
    if times is None:
        return {Cause.DECODE: seconds}
    preempted = times.preempted_us / 1e6
    decode = max(0.0, times.decode_us / 1e6 - preempted)
    steps, slow = _without_slowness(decode, slowness)
    part = steps / decode if decode else 0.0
    prompts, sequences = times.prompts_us / 1e6 * part, times.sequences_us / 1e6 * part
    return _fitting(
        seconds,
        {
            Cause.PREEMPTED: preempted,
            Cause.SLOW_REPLICA: slow,
            Cause.PROMPTS_BESIDE: prompts,
            Cause.SEQUENCES_BESIDE: sequences,
            Cause.DECODE: max(0.0, steps - prompts - sequences),
        },
    )


def _without_slowness(seconds: float, slowness: float) -> tuple[float, float]:
    """What its peers would take, and the rest."""
    normal = seconds / slowness if slowness >= SLOW else seconds
    return normal, seconds - normal


def _fitting(seconds: float, parts: Mapping[Cause, float]) -> dict[Cause, float]:
    """The parts and the rest, together as long as measured here: the replica has another clock."""
    total = sum(parts.values())
    scale = seconds / total if total > seconds else 1.0
    fitted = {cause: part * scale for cause, part in parts.items() if part > 0}
    fitted[Cause.REST] = max(0.0, seconds - total * scale)
    return fitted
