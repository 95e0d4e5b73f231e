"""Seeded fault schedules over the production engine, exchange, fleet and choice runs.

HEADRACE_SIMULATION_SEEDS=N runs seeds up to N instead; a failure contains the command that replays it.
"""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Iterator

import pytest
import structlog

from support.simulation.regression_seeds import REGRESSION_SEEDS
from support.simulation.schedule import run_in_loop

SEEDS = int(os.environ.get("HEADRACE_SIMULATION_SEEDS", 0))
LAST = SEEDS or 120
SHARE = 120  # seeds per test


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """Failed steps are part of the simulation and are not logged."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


def _run(seed: int, *, moves: bool = False) -> Counter[str]:
    try:
        return asyncio.run(run_in_loop(seed, moves=moves))
    except Exception as error:
        replay = f"PYTHONPATH=tests .venv/bin/python -m support.simulation.schedule {seed}{' --moves' * moves}"
        raise AssertionError(f"seed {seed}: {error}\nreplay: {replay}") from error


@pytest.mark.parametrize("seed", REGRESSION_SEEDS)
def test_seeds_that_failed_once(seed: int) -> None:
    _run(seed, moves=seed % 2 == 1)


@pytest.mark.parametrize("first", range(0, LAST, SHARE))
def test_no_schedule_violates_an_invariant(first: int) -> None:
    """In every odd one streams are also moved at random times."""
    total: Counter[str] = Counter()
    seeds = range(first, min(first + SHARE, LAST))
    for seed in seeds:
        total += _run(seed, moves=seed % 2 == 1)
    # Faults had an effect: fetches succeeded and failed, clients disconnected, deadlines passed, streams moved.
    assert total["fetches"] > total["fetched"] > total["fetches"] // 3
    assert total["FINISH_LENGTH"] > 5 * len(seeds) // 2
    if len(seeds) >= SHARE:
        assert total["disconnected"] and total["deadline"] and total["moved"] > SHARE // 2
        assert total["sources_chosen"] > SHARE // 8, "production's policy chose no prefill replica"
        assert total["stalled"] > 0, "no stalled replica lost its attempts"


def test_a_seed_is_one_schedule() -> None:
    """The same events in the same order: otherwise a failing seed could not be replayed."""
    assert _run(7) == _run(7)
