"""What a simulated client requests, and when it disconnects."""

from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """The phase of a request in which its client disconnects."""

    QUEUED = "queued"
    REQUESTED = "requested"
    GRANTED = "granted"
    MOVING = "moving"
    COMMITTED = "committed"
    PREFILL = "prefill"
    FIRST_TOKEN = "first token"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A client's request, and the phase in which the client disconnects."""

    number: int
    arrival: float
    prompt: list[int]
    max_tokens: int
    salt: bytes
    priority: int
    deadline: float | None
    disconnects_in: Phase | None
    pinned: str = ""  # the replica that it is placed on, if that is ready
