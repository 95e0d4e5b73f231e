"""How a candidate would get the KV blocks of a prompt."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Way:
    """With the seconds of the first token and of others' delay. At most one of `source` and `holder` is set."""

    target: int
    first_token: float
    delay: float
    source: int | None = None
    holder: int | None = None
