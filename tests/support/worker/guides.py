"""Guides for tests: the allowed tokens are a function of all tokens so far, so that an outdated mask is detected."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from headrace_worker.core.guide import Mask

Rule = Callable[[Sequence[int]], Collection[int]]
"""Tokens so far -> allowed next tokens."""


def mask_of(allowed: Collection[int], vocab_size: int) -> Mask:
    """The bits of some tokens, set one by one."""
    mask = np.zeros(-(-vocab_size // 32), np.uint32)
    for token in allowed:
        mask[token // 32] |= np.uint32(1 << token % 32)
    return mask.view(np.int32)


@dataclass
class RuleGuide:
    """A `TokenGuide` that raises for a token that its rule does not allow."""

    vocab_size: int
    rule: Rule
    longest: int = 1 << 30  # tokens after which it is finished
    taken: list[int] = field(default_factory=list)

    def mask(self) -> Mask:
        return mask_of(self.rule(self.taken), self.vocab_size)

    def advance(self, token: int) -> None:
        if token not in self.rule(self.taken):
            raise ValueError("the token is not allowed")
        self.taken.append(token)

    @property
    def finished(self) -> bool:
        return len(self.taken) >= self.longest


def one_in(modulus: int, vocab_size: int) -> Rule:
    """One in `modulus` ids is allowed; which one depends on all tokens so far and their positions."""

    def rule(taken: Sequence[int]) -> Collection[int]:
        return range(
            3 + sum((token + 1) * place for place, token in enumerate(taken, 1)) % modulus, vocab_size, modulus
        )

    return rule


def exactly(tokens: Sequence[int]) -> Rule:
    """Allows exactly one sequence."""
    return lambda taken: tokens[len(taken) : len(taken) + 1]


def number(digits: Collection[int], end: int, most: int) -> Rule:
    """One to `most` digits, no two adjacent ones equal, then the end."""

    def rule(taken: Sequence[int]) -> Collection[int]:
        follow = set(digits) - set(taken[-1:]) if len(taken) < most else set()
        return follow | {end} if taken else follow

    return rule
