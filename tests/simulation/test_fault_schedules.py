"""Thousands of seeded fault schedules over the production engine, exchange, journey and attempt (RELIABILITY I1, I2,
I9, I10, I11). HEADRACE_SIMULATION_SEEDS=N runs seeds up to N instead; a failing one says how it is replayed.
"""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Iterator

import pytest
import structlog
from kept import KEPT
from schedule import run_in_loop

SEEDS = 2400
SHARE = 200  # seeds per test
LAST = int(os.environ.get("HEADRACE_SIMULATION_SEEDS", SEEDS))


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """Steps that fail are what is simulated, and nothing to report."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


def _run(seed: int, *, moves: bool = False) -> Counter[str]:
    try:
        return asyncio.run(run_in_loop(seed, moves=moves))
    except Exception as error:
        replay = f"python tests/simulation/schedule.py {seed}{' --moves' * moves}"
        raise AssertionError(f"seed {seed}: {error}\nreplay: {replay}") from error


@pytest.mark.parametrize("seed", KEPT)
def test_seeds_that_failed_once(seed: int) -> None:
    _run(seed)


@pytest.mark.parametrize("first", range(0, LAST, SHARE))
def test_no_schedule_breaks_a_promise(first: int) -> None:
    """In every other one the router rebalances, too."""
    total: Counter[str] = Counter()
    for seed in range(first, min(first + SHARE, LAST)):
        total += _run(seed, moves=seed % 2 == 1)
    # Whether faults hit anything: prompts were fetched whole and in vain, clients left, requests were preempted.
    assert total["fetches"] > total["fetched"] > total["fetches"] // 3
    assert total["FINISH_LENGTH"] > 5 * SHARE // 2 and total["left"] and total["deadline"]
    assert total["moved"] > SHARE // 2


def test_a_seed_is_one_schedule() -> None:
    """The same events in the same order, or a failing seed could not be replayed."""
    assert _run(7) == _run(7)
