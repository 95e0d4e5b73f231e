"""Why an attempt was placed where it was."""

from dataclasses import asdict, dataclass
from typing import Any

from headrace_router.core.policy.interface import Prediction

MAX_CONSIDERED = 4  # candidates that are kept, the best ones


@dataclass(frozen=True, slots=True)
class Considered:
    """A candidate of a decision."""

    replica_id: str
    cost: float  # predicted seconds: until the first token, of the answer, and by which others are delayed
    cached_tokens: int  # of the prompt, that its cache had or was about to have


@dataclass(frozen=True, slots=True)
class Decision:
    """Of one placement. Without a policy that predicts, `considered` is empty."""

    replica_id: str
    candidates: int  # that could have been chosen
    tokens: int  # to be in the cache: of the prompt, and of earlier attempts
    prediction: Prediction | None = None
    source_id: str = ""  # the replica that computes the prompt or sends its cached blocks
    source_computes: bool = False
    considered: tuple[Considered, ...] = ()

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)
