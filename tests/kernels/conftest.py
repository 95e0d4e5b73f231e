"""Memory that ops allocate is NaN until they write it."""

from collections.abc import Iterator

import pytest
import torch

from support.kernels.triton_backend import run_triton_here

run_triton_here()  # before tests are imported: they read which backends are available


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty returns NaN (and the largest integers), so that an entry that an op does not write is detected."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
