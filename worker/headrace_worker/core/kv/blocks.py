"""The pool of KV blocks: reference counts, and the index of cached contents."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

NULL_BLOCK = 0
"""Never allocated: replaces a block in a block table when a window has moved past it."""


@dataclass(slots=True, eq=False)
class Lineage:
    """The snapshots of one request, which a request with a longer prompt supersedes when it starts from one of them."""

    prompt_len: int
    digests: list[bytes] = field(default_factory=list)
    newest: bytes = b""  # the published snapshot of its progress: only the newest one is of use


class Content(NamedTuple):
    """The content of a hashed block. The tokens are kept to compare on a hit."""

    group: int
    digest: bytes
    tokens: bytes  # little-endian u32
    lineage: Lineage | None = None  # lineage of a snapshot of recurrent state, unless requests part there


class CacheChange(NamedTuple):
    """A block's content was added to the index (stored) or removed from it."""

    group: int
    digest: bytes
    stored: bool
    offloaded: bool = False  # if it was removed: whether it is in host memory or on disk


class BlockPool:
    """Reference-counted blocks 1..num_blocks-1 in four states.

    * free: has no content;
    * used: referenced by at least one request, shared when its content is hashed;
    * cached: not referenced, content hashed, evicted least recently used first;
    * quarantined: not referenced, but a posted receive may still write it.
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
        self._unstored: OrderedDict[int, None] | None = None  # blocks of `_cached` that `take_unstored` has not taken
        self._forgotten: list[bytes] = []  # digests, with `follow_unstored`
        self._superseded: list[bytes] = []  # the same
        self._quarantined: set[int] = set()
        self._by_digest: dict[bytes, int] = {}
        self._changes: list[CacheChange] = []

    @property
    def available(self) -> int:
        """Blocks that can be allocated now: free and cached."""
        return len(self._free) + len(self._cached)

    @property
    def free(self) -> int:
        """Blocks without a content that can be allocated now."""
        return len(self._free)

    @property
    def used(self) -> int:
        return self.total - len(self._free) - len(self._cached) - len(self._quarantined)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def quarantined(self) -> int:
        return len(self._quarantined)

    def allocate(self, count: int) -> list[int]:
        """Allocates `count` blocks with unknown contents; evicts cached ones when no free ones are left.

        The caller checks `available` first: more is a bug.
        """
        if count > self.available:
            raise RuntimeError(f"{count} blocks requested from a pool with {self.available} available")
        blocks: list[int] = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget_unstored(block)
                self._remove_content(block)
            self._references[block] = 1
            blocks.append(block)
        self.peak_used = max(self.peak_used, self.used)
        return blocks

    def find(self, digest: bytes, tokens: bytes) -> int | None:
        """The block with this content, or None. The tokens are compared, not the hash alone."""
        block = self._by_digest.get(digest)
        if block is None:
            return None
        content = self._contents[block]
        return block if content is not None and content.tokens == tokens else None

    def has(self, digest: bytes) -> bool:
        """Whether some block has this content."""
        return digest in self._by_digest

    def follow_unstored(self) -> None:
        """From now on cached blocks are to be stored elsewhere before they are evicted: `take_unstored`."""
        self._unstored = OrderedDict.fromkeys(self._cached)

    @property
    def unstored(self) -> int:
        """Cached blocks that are not taken yet."""
        return len(self._unstored or ())

    def untake(self, block: int) -> None:
        """A cached block that was taken was not stored."""
        if self._unstored is not None and block in self._cached:
            self._unstored[block] = None
            self._unstored.move_to_end(block, last=False)

    def postpone(self, digest: bytes) -> None:
        """A cached content is not taken before `resume`: another one replaces it soon."""
        block = self._by_digest.get(digest)
        if block is not None:
            self._forget_unstored(block)

    def resume(self, digest: bytes) -> None:
        """A content that was postponed is taken in its turn, if it is cached."""
        block = self._by_digest.get(digest)
        if self._unstored is not None and block is not None and block in self._cached:
            self._unstored[block] = None

    @property
    def has_outdated(self) -> bool:
        """Whether `take_outdated` would return any."""
        return bool(self._forgotten or self._superseded)

    def take_outdated(self) -> tuple[list[bytes], list[bytes]]:
        """Digests since the last call: those that are not used again, and those that are to be evicted next."""
        forgotten, self._forgotten = self._forgotten, []
        superseded, self._superseded = self._superseded, []
        return forgotten, superseded

    def take_unstored(self, count: int) -> list[tuple[int, Content]]:
        """The next ones of these to be evicted, in that order, and their contents: until each is released again."""
        taken: list[tuple[int, Content]] = []
        while self._unstored and len(taken) < count:
            block, _ = self._unstored.popitem(last=False)
            content = self._contents[block]
            if content is not None:
                taken.append((block, content))
        return taken

    def content(self, block: int) -> Content | None:
        """The published content of a block."""
        return self._contents[block]

    def is_cached(self, block: int) -> bool:
        """Whether the block is not referenced and counts as available."""
        return block in self._cached

    def acquire(self, block: int) -> None:
        """Adds a reference to a block that `find` returned."""
        if self._references[block] == 0:
            del self._cached[block]
            self._forget_unstored(block)
        self._references[block] += 1
        self.peak_used = max(self.peak_used, self.used)

    def publish(self, block: int, content: Content) -> bool:
        """Indexes the content of a referenced, completely computed block. Returns whether it is new.

        When another block already has the same content, that one stays the shared one.
        """
        if self._contents[block] is not None or content.digest in self._by_digest:
            return False
        self._contents[block] = content
        self._by_digest[content.digest] = block
        self._changes.append(CacheChange(content.group, content.digest, True))
        return True

    def discard(self, digest: bytes) -> None:
        """Removes a content from the index, if it is there; an unreferenced block is free at once."""
        if self._unstored is not None:
            self._forgotten.append(digest)
        block = self._by_digest.get(digest)
        if block is not None:
            self._remove_content(block)
            if block in self._cached:
                del self._cached[block]
                self._forget_unstored(block)
                self._free.append(block)

    def evict_next(self, digest: bytes) -> None:
        """Nothing is expected to start from this content again: if it is cached, it is the next to be evicted."""
        if self._unstored is not None:
            self._superseded.append(digest)
        block = self._by_digest.get(digest)
        if block is not None and block in self._cached:
            self._cached.move_to_end(block, last=False)
            self._forget_unstored(block)

    def forget(self, block: int) -> None:
        """Removes the content of a referenced block from the index; requests that share the block continue with it."""
        content = self._contents[block]
        if content is not None and self._unstored is not None:
            self._forgotten.append(content.digest)
        self._remove_content(block)

    def release(self, blocks: Iterable[int]) -> None:
        """Removes one reference from each block. The last one is evicted first: prefixes stay longer than tails."""
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
                    if self._unstored is not None:
                        self._unstored[block] = None

    def quarantine(self, blocks: Iterable[int]) -> None:
        """Removes the only reference to each block without freeing it: a receive may still write it."""
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

    def still_has(self, block: int, content: Content) -> bool:
        """Whether a block that had this content, as `oldest` returned it, has kept it since."""
        return self._contents[block] is content

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
                raise RuntimeError(f"block {block} is indexed under a hash that it does not have")
        if sum(content is not None for content in self._contents) != len(self._by_digest):
            raise RuntimeError("a block has a hash that is not indexed")

    def _forget_unstored(self, block: int) -> None:
        if self._unstored is not None:
            self._unstored.pop(block, None)

    def _remove_content(self, block: int) -> None:
        content = self._contents[block]
        if content is not None:
            self._contents[block] = None
            del self._by_digest[content.digest]
            self._changes.append(CacheChange(content.group, content.digest, False))
