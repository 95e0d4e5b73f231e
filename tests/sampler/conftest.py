"""A sampler with the rows' tokens, as in the runner."""

from collections.abc import Callable

import pytest

from support.sampler.bench import Bench


@pytest.fixture
def bench() -> Callable[..., Bench]:
    return Bench
