"""The index against sets of blocks per replica, after random changes."""

import random

import numpy as np
import pytest

from headrace_router.core.prefix_index import Digests, DigestTable, PrefixIndex, TableFullError

MAX_BLOCKS = 1 << 16


def digests(values: list[int]) -> Digests:
    return np.array(values, np.uint64)


class Truth:
    """An index and what it must know; each of its chains is a prompt with random beginnings of others."""

    def __init__(self, seed: int, prompts: int = 12, blocks: int = 40) -> None:
        self.random = random.Random(seed)
        self.index = PrefixIndex(MAX_BLOCKS)
        self.held: dict[int, set[int]] = {}
        self.expected: dict[int, set[int]] = {}
        self.chains: list[list[int]] = []
        for _ in range(prompts):
            chain = self.random.choice(self.chains)[: self.random.randrange(blocks)] if self.chains else []
            self.chains.append([*chain, *(self.random.randrange(1, 1 << 64) for _ in range(blocks - len(chain)))])

    def change(self) -> None:
        kind = self.random.choices(["store", "remove", "open", "close", "sweep"], [8, 5, 1, 0.5, 3])[0]
        if kind == "open" or not self.held:
            slot = self.index.open()
            assert slot not in self.held
            self.held[slot], self.expected[slot] = set(), set()
            return
        slot = self.random.choice(list(self.held))
        chain = self.random.choice(self.chains)
        some = chain[: self.random.randrange(len(chain) + 1)] if self.random.random() < 0.7 else chain[::3]
        if kind == "store":
            expected = self.random.random() < 0.3
            self.index.store(slot, digests(some), expected=expected)
            (self.expected if expected else self.held)[slot] |= set(some)
        elif kind == "remove":
            some = some[self.random.randrange(len(some) + 1) :]
            expected = self.random.random() < 0.3
            self.index.remove(slot, digests(some), expected=expected)
            (self.expected if expected else self.held)[slot] -= set(some)
        elif kind == "close":
            self.index.close(slot)
            del self.held[slot], self.expected[slot]
        else:
            self.index.sweep(self.random.randrange(3))

    def check(self) -> None:
        for chain in self.chains:
            lengths = self.index.match(digests(chain))
            for slot in range(self.index.slots):
                held = self.held.get(slot, set()) | self.expected.get(slot, set())
                expected = next((place for place, block in enumerate(chain) if block not in held), len(chain))
                assert lengths[slot] == expected
                assert self.index.holders(digests(chain), np.array([slot]))[:, 0].tolist() == [
                    block in held for block in chain
                ]


@pytest.mark.parametrize("seed", range(20))
def test_it_equals_the_replicas_sets(seed: int) -> None:
    truth = Truth(seed)
    for turn in range(400):
        truth.change()
        if turn % 20 == 0:
            truth.check()
    truth.check()
    for slot in list(truth.held):
        truth.index.close(slot)
    assert not any(truth.index.match(digests(chain)).any() for chain in truth.chains)
    for _ in range(3 * (1 + MAX_BLOCKS // 4096)):
        truth.index.sweep(1)
    assert truth.index.blocks == 0
    assert len(truth.index._sets) == 0


def test_a_slot_is_used_again_only_once_its_blocks_are_removed() -> None:
    index = PrefixIndex(MAX_BLOCKS)
    slot, chain = index.open(), digests([5, 6, 7])
    index.store(slot, chain)
    index.close(slot)
    assert not index.match(chain).any()
    assert index.open() != slot
    index.sweep(100)
    assert index.open() == slot
    assert not index.match(chain).any()


def test_digests_in_the_table_survive_splits() -> None:
    table, generator = DigestTable(1 << 18), np.random.default_rng(3)
    known: dict[int, int] = {}
    while table.segments < 20:
        new = generator.integers(1, 1 << 64, 700, dtype=np.uint64)
        values = generator.integers(0, 1 << 30, 700, dtype=np.int32)
        table.insert(new, values)
        known.update(zip(new.tolist(), values.tolist(), strict=True))
        gone = digests(random.Random(len(known)).sample(list(known), 100))
        table.remove(table.find(gone))
        for digest in gone.tolist():
            del known[digest]
    places = table.find(digests(list(known)))
    assert table.values(places).tolist() == list(known.values())
    assert table.count == len(known)
    assert (table.find(generator.integers(1, 1 << 64, 999, dtype=np.uint64)) == -1).all()


def test_a_full_table_stores_no_more() -> None:
    table, generator = DigestTable(1), np.random.default_rng(3)
    with pytest.raises(TableFullError):
        for _ in range(100):
            table.insert(generator.integers(1, 1 << 64, 700, dtype=np.uint64), np.zeros(700, np.int32))
    assert 5000 < table.count <= 8192
    table.find(digests([1, 2]))
