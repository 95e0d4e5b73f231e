"""A fake replica that implements the real contract, a router that uses it, and a small tokenizer."""

import time
from collections.abc import Callable, Iterator

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from support.router.fake_replica import REPLY, SPECIAL, FakeReplica
from support.router.harness import Harness


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Byte-level BPE with a few merges and three special tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(
        [REPLY, "the quick brown fox jumps over the lazy dog", "system user assistant"] * 3, trainer
    )
    return made


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

    def wait(condition: Callable[[], bool], seconds: float = 5.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "the condition did not become true"
            time.sleep(0.01)

    return wait


@pytest.fixture(scope="session")
def expected_reply() -> str:
    return REPLY
