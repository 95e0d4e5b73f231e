"""Fixtures of the engine's tests: a fake runner whose tokens depend only on a row's own tokens."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headrace_proto.block_hash import BlockHasher, derive_key
from headrace_worker.core.engine import Engine
from headrace_worker.core.kv.manager import KVManager, ModelScope
from headrace_worker.core.scheduler import Scheduler
from headrace_worker.core.scheduler_limits import SchedulerLimits
from support.worker.engine_bench import Bench, Clock, make_layout
from support.worker.fake_model import expected, expected_of
from support.worker.fake_runner import FakeRunner, PipelineRunner
from support.worker.served_engine import ServedEngine


@pytest.fixture
def make_bench() -> Callable[..., Bench]:
    """Creates a bench: windows per cache group, blocks, limits, depth of the loop; `batches` > 1: as many in flight."""

    def make(
        windows: tuple[int, ...] = (0,),
        num_blocks: int = 128,
        max_num_seqs: int = 8,
        budget: int = 32,
        block_size: int = 4,
        depth: int = 0,
        max_waiting: int = 1000,
        batches: int = 1,
    ) -> Bench:
        layout = make_layout(windows, block_size)
        clock = Clock()
        kv = KVManager(layout, num_blocks, BlockHasher(derive_key(b"k")), ModelScope("m", "r", "float32", "float32"))
        scheduler = Scheduler(SchedulerLimits(max_num_seqs, budget, max_waiting, batches=batches), kv, clock)
        runner = FakeRunner(layout) if batches == 1 else PipelineRunner(layout, batches=batches)
        return Bench(
            Engine(scheduler, runner, clock, depth if batches == 1 else batches - 1), runner, scheduler, kv, clock
        )

    return make


@pytest.fixture
def undisturbed() -> Callable[[list[int], int], list[int]]:
    """The fake model's outputs for a prompt."""
    return expected


@pytest.fixture
def undisturbed_of() -> Callable[..., list[int]]:
    """The fake model's outputs for a prompt and a new guide."""
    return expected_of


@pytest.fixture
def make_served(make_bench: Callable[..., Bench]) -> Iterator[Callable[..., ServedEngine]]:
    """Creates a bench behind a replica's gRPC server; options as those of `make_bench`."""
    made: list[ServedEngine] = []

    def make(**options: Any) -> ServedEngine:
        made.append(ServedEngine(make_bench(**options)))
        return made[-1]

    yield make
    for served in made:
        served.close()
