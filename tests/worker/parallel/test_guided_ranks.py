"""Constrained outputs over several ranks: the masks are sent to the rank that samples."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.ranks.workloads import guided_workload, outcome


@pytest.mark.parametrize(
    ("tp", "pp", "ahead"), [(2, 1, "off"), (2, 1, "on"), (1, 2, "off"), (1, 3, "off"), (2, 2, "off")]
)
def test_between_processes(
    tp: int,
    pp: int,
    ahead: str,
    save_tiny: Callable[..., Path],
    process_replica: Callable[..., Any],
    guided_expected: list[Any],
) -> None:
    """Twice, the second time with prefixes from the cache; and with a pool so small that some are preempted."""
    folder = save_tiny("llama")
    share = 30_000 * {1: 3, 2: 2, 3: 1}[pp] // tp  # layers of the first stage
    with process_replica(folder, tp, pp, async_scheduling=ahead) as replica:
        assert outcome(replica.offline.generate(guided_workload(16))) == guided_expected
        assert outcome(replica.offline.generate(guided_workload(16))) == guided_expected
        assert replica.offline.assembly.kv.pool.used == 0
    with process_replica(folder, tp, pp, async_scheduling=ahead, kv_cache_memory=share) as replica:
        engine = replica.offline.assembly.engine
        assert (
            outcome(replica.offline.generate(guided_workload(16), after_step=engine.scheduler.check)) == guided_expected
        )
        assert engine.scheduler.counters.preemptions > 0
