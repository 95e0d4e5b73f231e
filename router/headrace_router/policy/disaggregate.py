"""Whether a prompt is better computed by a prefill replica than where its answer is drawn: one sum of seconds each.

here:   the queue's missing tokens, then the prompt; and each stream that runs here waits as long as the prompt takes,
        up to a horizon, since its steps carry the prompt's chunks
there:  the source's queue, then the prompt, then what the transfer adds; nobody streams there

All from the replicas' own fitted step models. One that has computed nothing yet predicts nothing: it counts like the
other one, or both as a guess.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from headrace_proto.replica_pb2 import Load

HORIZON_SECONDS = 1.0  # of delay to one stream
TRANSFER_SECONDS = 0.005  # asking, and the last chunk's way
TRANSFER_SHARE = 0.1  # of the prompt's time: the rest of the bytes goes while it is computed
LEAST_TOKENS = 64
GUESS_SECONDS = 0.001  # per token, until any replica has computed some

Mode = Literal["auto", "always", "off"]


class Source(Protocol):
    """A prefill replica."""

    @property
    def load(self) -> Load: ...

    @property
    def promised_tokens(self) -> int:
        """Tokens of prompts that were sent its way and are not known to be computed."""


class Target(Protocol):
    """The replica that will answer."""

    @property
    def load(self) -> Load: ...

    @property
    def unreported(self) -> int:
        """Attempts sent that its load cannot contain yet."""

    @property
    def unreported_tokens(self) -> int:
        """Of those, tokens to be computed there."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is to be computed: tokens, output of earlier attempts included."""

    tokens: int


def choose_source(prompt: Prompt, target: Target, sources: Sequence[Source], mode: Mode = "auto") -> int | None:
    """The index of the source that pays most, or None when the target better computes the prompt itself.

    `always` asks only which source; short prompts stay where they are even so.
    """
    if mode == "off" or prompt.tokens < LEAST_TOKENS or not sources:
        return None
    known = [rate for load in (target.load, *(source.load for source in sources)) if (rate := _rate(load)) > 0]
    usual = min(known, default=GUESS_SECONDS)
    there = [_there(prompt, source, _rate(source.load) or usual) for source in sources]
    best = there.index(min(there))
    if mode == "always":
        return best
    return best if there[best] < _here(prompt, target, _rate(target.load) or usual) else None


def _rate(load: Load) -> float:
    return load.step_model.per_prefill_token_ms / 1e3


def _here(prompt: Prompt, target: Target, rate: float) -> float:
    delay = min(prompt.tokens * rate, HORIZON_SECONDS)
    queue = target.load.waiting_tokens + target.unreported_tokens
    return (queue + prompt.tokens) * rate + (target.load.running + target.unreported) * delay


def _there(prompt: Prompt, source: Source, rate: float) -> float:
    queue = max(source.load.waiting_tokens, source.promised_tokens)
    return (queue + prompt.tokens * (1 + TRANSFER_SHARE)) * rate + TRANSFER_SECONDS
