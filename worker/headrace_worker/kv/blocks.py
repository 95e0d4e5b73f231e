"""The pool of KV blocks: who holds each block, and which contents can be found again."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

NULL_BLOCK = 0
"""Never handed out: stands in a block table where a window has moved past a block."""


class Content(NamedTuple):
    """What a hashed block holds. The tokens are kept to compare on a hit (RELIABILITY R11)."""

    group: int
    digest: bytes
    tokens: bytes  # little-endian u32


class CacheChange(NamedTuple):
    """A block's content became findable (stored) or stopped being so."""

    group: int
    digest: bytes
    stored: bool


class BlockPool:
    """Reference-counted blocks 1..num_blocks-1 in four states.

    * free: holds nothing worth keeping;
    * used: held by at least one request, shared when its content is hashed;
    * cached: held by nobody, content hashed, evicted least recently used first;
    * quarantined: held by nobody, but a posted receive may still write it (RELIABILITY R13).
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError("a pool needs the null block and at least one more")
        self.total = num_blocks - 1
        self.peak_used = 0
        self._references = [0] * num_blocks
        self._contents: list[Content | None] = [None] * num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._quarantined: set[int] = set()
        self._by_digest: dict[bytes, int] = {}
        self._changes: list[CacheChange] = []

    @property
    def available(self) -> int:
        """Blocks that can be allocated now: free and cached."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        return self.total - self.available - len(self._quarantined)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def quarantined(self) -> int:
        return len(self._quarantined)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks with unknown contents; evicts cached ones when free ones run out.

        The caller checks `available` first: asking for more is an error of ours.
        """
        if count > self.available:
            raise RuntimeError(f"{count} blocks asked of a pool with {self.available}")
        blocks: list[int] = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget(block)
            self._references[block] = 1
            blocks.append(block)
        self.peak_used = max(self.peak_used, self.used)
        return blocks

    def find(self, digest: bytes, tokens: bytes) -> int | None:
        """The block that holds this content, or None. The tokens must agree, not the hash alone."""
        block = self._by_digest.get(digest)
        if block is None:
            return None
        content = self._contents[block]
        return block if content is not None and content.tokens == tokens else None

    def is_cached(self, block: int) -> bool:
        """Whether the block is held by nobody and counts as available."""
        return block in self._cached

    def acquire(self, block: int) -> None:
        """Adds a holder to a block that `find` gave."""
        if self._references[block] == 0:
            del self._cached[block]
        self._references[block] += 1
        self.peak_used = max(self.peak_used, self.used)

    def publish(self, block: int, content: Content) -> None:
        """Makes the content of a held, completely computed block findable.

        When another block already holds the same content, that one stays the shared one.
        """
        if self._contents[block] is None and content.digest not in self._by_digest:
            self._contents[block] = content
            self._by_digest[content.digest] = block
            self._changes.append(CacheChange(content.group, content.digest, True))

    def release(self, blocks: Iterable[int]) -> None:
        """Drops one holder from each block. Given first to last, the last is evicted first: prefixes outlive tails."""
        for block in reversed(list(blocks)):
            if block == NULL_BLOCK:
                continue
            count = self._references[block] - 1
            if count < 0:
                raise RuntimeError(f"block {block} released more often than held")
            self._references[block] = count
            if count == 0:
                if self._contents[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def quarantine(self, blocks: Iterable[int]) -> None:
        """Takes blocks from their single holder without freeing them: a receive may still write them."""
        for block in blocks:
            if self._references[block] != 1 or self._contents[block] is not None:
                raise RuntimeError(f"block {block} is shared or published and cannot be quarantined")
            self._references[block] = 0
            self._quarantined.add(block)

    def end_quarantine(self, blocks: Iterable[int]) -> None:
        """The receive completed or its communicator was aborted: the blocks are free again."""
        for block in blocks:
            self._quarantined.remove(block)
            self._free.append(block)

    def clear_cache(self) -> int:
        """Forgets all contents; blocks in use stay with their holders, unshared from now on. Returns how many."""
        digests = list(self._by_digest.values())
        for block in digests:
            self._forget(block)
        self._free.extend(self._cached)
        self._cached.clear()
        return len(digests)

    def contents(self) -> Iterator[Content]:
        """Every findable content."""
        for block in self._by_digest.values():
            content = self._contents[block]
            if content is not None:
                yield content

    def take_changes(self) -> list[CacheChange]:
        """Changes since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def check(self) -> None:
        """Raises RuntimeError unless every block is in exactly one state and the indexes agree."""
        used = sum(1 for count in self._references if count > 0)
        states = len(self._free) + used + len(self._cached) + len(self._quarantined)
        if states != self.total:
            raise RuntimeError(
                f"free {len(self._free)} + used {used} + cached {len(self._cached)} + quarantined "
                f"{len(self._quarantined)} = {states}, but the pool has {self.total}"
            )
        idle = set(self._free) | set(self._cached) | self._quarantined
        if len(idle) != states - used or NULL_BLOCK in idle or any(self._references[block] for block in idle):
            raise RuntimeError("a block is in two states")
        for digest, block in self._by_digest.items():
            content = self._contents[block]
            if content is None or content.digest != digest:
                raise RuntimeError(f"block {block} is indexed under a hash that it does not hold")
        if sum(content is not None for content in self._contents) != len(self._by_digest):
            raise RuntimeError("a block holds a hash that is not indexed")

    def _forget(self, block: int) -> None:
        content = self._contents[block]
        if content is not None:
            self._contents[block] = None
            del self._by_digest[content.digest]
            self._changes.append(CacheChange(content.group, content.digest, False))
