"""What dropping a block costs: how many of those that full caches drop are asked for again."""

import numpy as np

from headrace_router.core.prefix_index import REMEMBERED, SAMPLED, ReuseShare


def _blocks(first: int, count: int) -> "np.typing.NDArray[np.uint64]":
    return np.arange(first, first + count, dtype=np.uint64)


def test_it_follows_what_is_asked_for_again() -> None:
    share = ReuseShare()
    assert share.share == 0.5, "until more is known"
    for turn in range(50):
        dropped = _blocks(10_000 * turn, 1000)
        share.dropped(dropped)
        share.asked(dropped[:250])
        share.asked(dropped[:250])  # each counts once
    assert 0.2 < share.share < 0.3
    for turn in range(100, 200):
        share.dropped(_blocks(10_000 * turn, 1000))
    assert share.share < 0.05


def test_its_memory_is_bounded() -> None:
    share = ReuseShare()
    for turn in range(20):
        share.dropped(_blocks(turn * SAMPLED * REMEMBERED, SAMPLED * REMEMBERED))
    assert len(share._dropped) <= REMEMBERED
    share.asked(_blocks(0, SAMPLED * REMEMBERED))
    assert share.share < 0.1, "the oldest are forgotten"
