"""Whether a prefill replica should compute a prompt instead of the replica that decodes it: compares predicted seconds.

target:  the tokens in its queue, then the prompt; and each stream that runs there is delayed by the prompt's time, up
         to a horizon, since its steps include the prompt's chunks
source:  the tokens in its queue, then the prompt or its transfer, whichever is longer; no stream runs there

All from the replicas' own fitted step models, and from the transfers that each pair has measured: layers are sent
while the next ones are computed. A replica that has computed nothing yet has no prediction: the fastest known rate is
used for it, or a constant guess for all. For a pair without recent transfers the fastest of the target's other pairs
counts, or a guess: the first transfer shows its own.
"""

from collections.abc import Sequence
from typing import Literal

from headrace_proto.replica_pb2 import Load
from headrace_router.core.policy.interface import Candidate

HORIZON_SECONDS = 1.0  # of delay to one stream
TRANSFER_SECONDS = 0.005  # the fetch request, and the transfer of the last layer
GUESS_SHARE = 0.1  # of the prompt's time that a transfer adds, until the target has fetched from any source
LEAST_TOKENS = 64
GUESS_SECONDS = 0.001  # per token, until any replica has computed some

Mode = Literal["auto", "always", "off"]


def choose_source(
    tokens: int,
    target: Candidate,
    sources: Sequence[Candidate],
    mode: Mode = "auto",
    least_tokens: int = LEAST_TOKENS,
) -> int | None:
    """The index of the fastest source, or None when the target should compute the prompt itself.

    tokens: to compute, output of earlier attempts included. `always` only chooses among sources; prompts shorter than
    `least_tokens` stay at the target in this mode, too.
    """
    if mode == "off" or tokens < least_tokens or not sources:
        return None
    known = [rate for load in (target.load, *(source.load for source in sources)) if (rate := _rate(load)) > 0]
    fallback = min(known, default=GUESS_SECONDS)
    speeds = {speed.address: speed.per_token_ms / 1e3 for speed in target.load.sources}
    fastest = min(speeds.values(), default=None)
    seconds = [
        _source_seconds(tokens, source, _rate(source.load) or fallback, speeds.get(source.address, fastest))
        for source in sources
    ]
    best = seconds.index(min(seconds))
    if mode == "always":
        return best
    return best if seconds[best] < _target_seconds(tokens, target, _rate(target.load) or fallback) else None


def _rate(load: Load) -> float:
    return load.step_model.per_prefill_token_ms / 1e3


def _target_seconds(tokens: int, target: Candidate, rate: float) -> float:
    delay = min(tokens * rate, HORIZON_SECONDS)
    queue = target.load.waiting_tokens + target.unreported_tokens
    return (queue + tokens) * rate + (target.load.running + target.unreported) * delay


def _source_seconds(tokens: int, source: Candidate, rate: float, transfer: float | None) -> float:
    """transfer: seconds per token; None = not known."""
    queue = max(source.load.waiting_tokens, source.remote_prompt_tokens)
    per_token = rate * (1 + GUESS_SHARE) if transfer is None else max(rate, transfer)
    return queue * rate + tokens * per_token + TRANSFER_SECONDS
