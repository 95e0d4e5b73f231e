"""A fake replica that implements the real contract, a router that uses it, and a small tokenizer."""

import time
from collections.abc import Callable, Iterator

import pytest
from tokenizers import Tokenizer

from support.router.fake_replica import REPLY, FakeReplica
from support.router.harness import Harness
from support.router.tokenizer import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


@pytest.fixture
def make_replica(tokenizer: Tokenizer) -> Callable[..., FakeReplica]:
    return lambda **options: FakeReplica(tokenizer, **options)


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness()
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared(tokenizer: Tokenizer) -> Iterator[Harness]:
    """A router with one replica without faults, for tests that change nothing."""
    made = Harness()
    made.start([FakeReplica(tokenizer)])
    yield made
    made.close()


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Waits until a condition holds; fails after five seconds."""

    def wait(condition: Callable[[], bool], seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "the condition did not become true"
            time.sleep(0.01)

    return wait


@pytest.fixture(scope="session")
def expected_reply() -> str:
    return REPLY
