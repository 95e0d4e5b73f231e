"""Slots of host memory and places in a file, by the KV blocks that they have; and how long copies take. Pure."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from headrace_worker.core.kv.blocks import Content


class Slots:
    """Which content each slot of host memory, or place in a file, has: least recently used first. None has number 0."""

    def __init__(self, slots: int, contents: Sequence[tuple[int, Content]] = ()) -> None:
        """contents: slots that have one already."""
        self.total = slots
        self._by_digest = OrderedDict((content.digest, (slot, content)) for slot, content in contents)
        filled = {slot for slot, _ in self._by_digest.values()}
        self._free = [slot for slot in range(slots, 0, -1) if slot not in filled]
        self._pins: dict[int, int] = {}
        self._dropped: set[int] = set()  # which are free once they are not pinned

    def __len__(self) -> int:
        return len(self._by_digest)

    def find(self, digest: bytes, tokens: bytes) -> int | None:
        """The slot with this content, which counts as used. The tokens are compared, not the hash alone."""
        found = self._by_digest.get(digest)
        if found is None or found[1].tokens != tokens:
            return None
        self._by_digest.move_to_end(digest)
        return found[0]

    def __contains__(self, digest: object) -> bool:
        return digest in self._by_digest

    def at(self, digest: bytes) -> tuple[int, Content]:
        """The slot with this content, which must be there, and the content."""
        return self._by_digest[digest]

    def contents(self) -> list[Content]:
        """All, least recently used first."""
        return [content for _, content in self._by_digest.values()]

    def take(self) -> tuple[int, Content | None] | None:
        """A slot to fill, pinned, and the content that it had; None if all are pinned."""
        if self._free:
            slot = self._free.pop()
            self.pin(slot)
            return slot, None
        for digest, (slot, content) in self._by_digest.items():
            if slot not in self._pins:
                del self._by_digest[digest]
                self.pin(slot)
                return slot, content
        return None

    def put(self, slot: int, content: Content) -> None:
        """The slot, which was taken, has this content now. If another one has it already, that one keeps it."""
        if content.digest in self._by_digest:
            self.give_back(slot)
        else:
            self._by_digest[content.digest] = slot, content

    def give_back(self, slot: int) -> None:
        """A slot that was taken has no content."""
        self._free.append(slot)

    def still_has(self, slot: int, content: Content) -> bool:
        """Whether the slot, which had this content, has kept it since."""
        return self._by_digest.get(content.digest) == (slot, content)

    def evict_next(self, digest: bytes) -> None:
        """If this content is here, it is the next one to be replaced."""
        if digest in self._by_digest:
            self._by_digest.move_to_end(digest, last=False)

    def drop(self, digest: bytes) -> None:
        """The slot with this content is free, once it is not pinned."""
        found = self._by_digest.pop(digest, None)
        if found is None:
            return
        if found[0] in self._pins:
            self._dropped.add(found[0])
        else:
            self._free.append(found[0])

    def pin(self, slot: int) -> None:
        self._pins[slot] = self._pins.get(slot, 0) + 1

    def unpin(self, slot: int) -> None:
        self._pins[slot] -= 1
        if not self._pins[slot]:
            del self._pins[slot]
            if slot in self._dropped:
                self._dropped.remove(slot)
                self._free.append(slot)


OLDER = 0.8  # weight of earlier times beside the newest one
PACE_SECONDS = 60.0  # then it is measured again


@dataclass(slots=True)
class Pace:
    """Seconds that copying takes for each of some blocks or tokens, as measured."""

    clock: Callable[[], float]
    _seconds: float = 0.0
    _at: float = -inf

    @property
    def seconds(self) -> float:
        """0 = not known, or too long ago."""
        return self._seconds if self.clock() - self._at < PACE_SECONDS else 0.0

    def add(self, seconds: float, count: float) -> None:
        """It took so long for that many, more than none."""
        known = self.seconds
        older = OLDER if known else 0.0
        self._seconds, self._at = older * known + (1 - older) * seconds / count, self.clock()
