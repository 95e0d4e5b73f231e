"""Constraints of an output, token by token: a grammar, a pattern, a list of choices. Pure: no tensor, no model."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

GUIDE_FAILED = (
    "the constraint of this output failed on it; send the request without the constraint, or with a simpler one"
)
NOTHING_ALLOWED = (
    "its constraint, allowed_token_ids, bad_words and min_tokens together allow no token here: use a smaller "
    "min_tokens, fewer bad_words, more allowed_token_ids, or a constraint that the vocabulary can express"
)

Mask = NDArray[np.int32]
"""[ceil(V / 32)]: bit t % 32 of word t // 32 is set if token t is allowed next. Missing words are 0."""


class TokenGuide(Protocol):
    """The state of one constrained output. A request's guide has been advanced by exactly the delivered tokens.

    Its state depends on those tokens alone: for a request with outputs of an earlier attempt a new guide is advanced by
    them, and a preempted request keeps its own. Only the step loop's thread calls it. An exception ends its request,
    and no other.
    """

    def mask(self) -> Mask:
        """The allowed next tokens, stop tokens included. Must not change until the next `advance`."""
        ...

    def advance(self, token: int) -> None:
        """Advance by the sampled token. Stop tokens end the request and are not passed."""
        ...

    @property
    def finished(self) -> bool:
        """No token may follow: the request ends as after a stop token, regardless of `min_tokens`."""
        ...
