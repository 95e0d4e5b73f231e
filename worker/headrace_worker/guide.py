"""What constrains an output token by token: a grammar, a pattern, a list of choices. Pure: no tensor, no model."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.int32]
"""[ceil(V / 32)]: bit t % 32 of word t // 32 is set where token t may come next. Words that are missing are 0."""


class TokenGuide(Protocol):
    """The state of one constrained output. A request's guide has taken in exactly the tokens that were delivered.

    It follows from those tokens alone: a request that is made with outputs of an earlier attempt has a fresh guide take
    them in, and one that is preempted keeps its own. Only the step loop's thread calls it. Whatever it raises ends its
    request, and no other.
    """

    def mask(self) -> Mask:
        """Which tokens may come next, stop tokens included. Must stay as it is until the next `advance`."""
        ...

    def advance(self, token: int) -> None:
        """Take in the token that was drawn. Stop tokens end the request and do not come here."""
        ...

    @property
    def finished(self) -> bool:
        """Nothing may follow: the request ends as by a stop token, whatever its minimum of tokens."""
        ...
