"""Fixtures of the engine's tests."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.worker.engine_bench import make_bench
from support.worker.served_engine import ServedEngine


@pytest.fixture
def make_served() -> Iterator[Callable[..., ServedEngine]]:
    """Creates a bench behind a replica's gRPC server; options as those of `make_bench`."""
    made: list[ServedEngine] = []

    def make(**options: Any) -> ServedEngine:
        made.append(ServedEngine(make_bench(**options)))
        return made[-1]

    yield make
    for served in made:
        served.close()
