"""A model without tensors: its tokens depend only on the tokens before them."""

import numpy as np

from headrace_worker.core.guide import Mask, TokenGuide


def next_token(tokens: list[int]) -> int:
    """The token that the fake model samples after `tokens`: a cheap, non-constant function of all of them."""
    value = len(tokens)
    for token in tokens:
        value = (value * 31 + token) % 50021
    return value % 1000 + 10


def guided_token(tokens: list[int], mask: Mask | None) -> int:
    """As `next_token`, or the next one that the mask allows."""
    token = next_token(tokens)
    if mask is None:
        return token
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    return int(allowed[np.searchsorted(allowed, token) % len(allowed)])


def undisturbed(prompt: list[int], count: int) -> list[int]:
    """The undisturbed outputs of the fake model."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def undisturbed_of(
    prompt: list[int], count: int, guide: TokenGuide, stop_ids: frozenset[int] = frozenset()
) -> list[int]:
    """The same for a guided request, until it ends."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count and not guide.finished and not stop_ids & set(tokens[len(prompt) :]):
        tokens.append(guided_token(tokens, guide.mask()))
        if tokens[-1] not in stop_ids:
            guide.advance(tokens[-1])
    return tokens[len(prompt) :]
