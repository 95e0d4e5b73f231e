"""Why a prompt was not cached further: compared with what this router has seen of its conversation. Pure."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np

from headrace_router.core.placement import Decision
from headrace_router.core.prefix_index import Digests
from headrace_router.core.replica_blocks import HashScheme, PromptBlocks


class MissReason(StrEnum):
    """The values are labels of a metric."""

    FIRST_VISIT = "first_visit"
    ANOTHER_TENANT = "another_tenant"
    SYSTEM_CHANGED = "system_changed"
    TOOLS_CHANGED = "tools_changed"
    MESSAGE_CHANGED = "message_changed"
    REWRITTEN = "rewritten"
    EVICTED = "evicted"
    OTHER_REPLICA = "other_replica"
    REPLICA_GONE = "replica_gone"


_FIRST_VISIT = "first visit"


@dataclass(frozen=True, slots=True)
class CacheMiss:
    """words: for people who operate the server. tokens: of the prompt, that no cache had and could have had."""

    reason: MissReason
    words: str
    tokens: int

    @property
    def public(self) -> str:
        """For the client, who is not told of other tenants."""
        words = _FIRST_VISIT if self.reason is MissReason.ANOTHER_TENANT else self.words
        return f"{words}; tokens={self.tokens}"

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {"reason": self.reason, "words": self.words, "tokens": self.tokens}


@dataclass(frozen=True, slots=True)
class Conversation:
    """A turn of a chat. keys: after each number of messages, from none to all; open_keys: the same without the tenant.

    digests: of each message. tools: of their definitions. answers: places of the assistant's messages. system: whether
    the first message is a system prompt. tenant: its salt.
    """

    model: str
    tenant: bytes
    tools: bytes
    keys: Sequence[bytes]
    open_keys: Sequence[bytes]
    digests: Sequence[bytes]
    answers: Sequence[int]
    system: bool

    def without_last(self) -> "Conversation":
        """The turn without its last message, which the answer continues."""
        last = len(self.digests) - 1
        return replace(
            self,
            keys=self.keys[:-1],
            open_keys=self.open_keys[:-1],
            digests=self.digests[:-1],
            answers=[place for place in self.answers if place != last],
        )


Holder: TypeAlias = tuple[str, int]  # a replica: its id, and which start of it


@dataclass(slots=True, eq=False)
class Visit:
    """A turn of a conversation that this router has seen. keys, answer: by which later turns find it; open_key: without
    the tenant. digests: of the messages, the answer included. blocks: of the prompt; None: they are not followed.
    """

    model: str
    tenant: bytes
    tools: bytes
    system: bool
    digests: bytes
    blocks: Digests | None
    block_size: int  # tokens
    holder: Holder
    keys: tuple[bytes, ...]
    answer: bytes
    open_key: bytes
    evicted: float | None = None  # when a replica dropped the last block of the prompt

    @property
    def bytes(self) -> int:
        return VISIT_BYTES + len(self.digests) + (self.blocks.nbytes if self.blocks is not None else 0)


VISIT_BYTES = 1200  # beside its digests and blocks
MOST_BYTES = 64 << 20  # of all visits: some 4,000 turns of 32,000 tokens
_SAME_ANSWER = 16  # newest turns with the same answer that are compared
_ANSWERS = 3  # earlier answers by which a visit is looked for
_DIGEST = 16  # bytes of a message's digest


class Visits:
    """The newest turns of conversations that this router has seen."""

    def __init__(self, serves: Callable[[Holder], bool], most_bytes: int = MOST_BYTES) -> None:
        """serves: whether this replica is still there."""
        self._serves = serves
        self._most = most_bytes
        self._bytes = 0
        self._visits: OrderedDict[str, Visit] = OrderedDict()  # by the id of the answer, the oldest first
        self._by_key: dict[bytes, Visit] = {}
        self._by_answer: dict[bytes, list[Visit]] = {}  # the newest last
        self._by_open_key: dict[bytes, Visit] = {}
        self._watched: dict[int, list[Visit]] = {}  # by the last block of the prompt
        self._dropped: list[Visit] = []  # since `stamp`

    def add(
        self,
        answer_id: str,
        turn: Conversation,
        answer: tuple[bytes, bytes] | None,
        prompt: Mapping[HashScheme, PromptBlocks],
        holder: Holder,
    ) -> None:
        """A turn is complete. answer: digest of the assistant's message, and the key after it; None if it is not known.

        holder: where its KV blocks are.
        """
        digest, end = answer if answer is not None else (b"", turn.keys[-1])
        size, blocks = _followed(prompt)
        visit = Visit(
            turn.model,
            turn.tenant,
            turn.tools,
            turn.system,
            b"".join((*turn.digests, digest)),
            blocks,
            size,
            holder,
            (turn.keys[-1], end),
            turn.tenant + digest,
            turn.open_keys[-1],
        )
        self._visits[answer_id] = visit
        self._bytes += visit.bytes
        self._by_key.update(dict.fromkeys(visit.keys, visit))
        if digest:
            self._by_answer.setdefault(visit.answer, []).append(visit)
        self._by_open_key[visit.open_key] = visit
        if blocks is not None and len(blocks):
            self._watched.setdefault(int(blocks[-1]), []).append(visit)
        while self._bytes > self._most:
            self._forget(self._visits.popitem(last=False)[1])

    def dropped(self, digests: Digests) -> None:
        """A replica has dropped these blocks."""
        for digest in self._watched.keys() & set(digests.tolist()) if self._watched else ():
            self._dropped += self._watched[digest]

    def stamp(self, now: float) -> None:
        """What was dropped since the last call was dropped about now."""
        for visit in self._dropped:
            visit.evicted = now
        self._dropped.clear()

    def get(self, answer_id: str, tenant: bytes) -> Visit | None:
        """The visit with this answer, if it is the tenant's."""
        visit = self._visits.get(answer_id)
        return visit if visit is not None and visit.tenant == tenant else None

    def miss(
        self,
        turn: Conversation,
        prompt: Mapping[HashScheme, PromptBlocks],
        tokens: int,
        cached: int,
        decision: Decision | None,
        now: float,
    ) -> CacheMiss | None:
        """Why a cache had only so many tokens of the prompt; None where it had all that it could have.

        tokens: of the prompt. cached: as the replica reports them. decision: that placed it.
        """
        size, blocks = _followed(prompt)
        visit = self._find(turn)
        if visit is None:
            return self._first_visit(turn, tokens - cached) if tokens - cached > size else None
        parted = miss_since(visit, turn, prompt)
        if parted is not None:
            lost = min(parted.tokens, tokens - cached)
            return replace(parted, tokens=lost) if lost > 0 else None
        lost = _common(visit.blocks, blocks) * size - cached
        if lost <= size:
            return None
        elsewhere = decision is not None and decision.most_cached_id != decision.replica_id
        if decision is not None and elsewhere and decision.most_cached > cached + size:
            where = "full" if decision.most_cached_full else "busier"
            words = f"on replica {decision.most_cached_id}, which was {where}"
            return CacheMiss(MissReason.OTHER_REPLICA, words, lost)
        if not self._serves(visit.holder):
            return CacheMiss(MissReason.REPLICA_GONE, f"on replica {visit.holder[0]}, which is gone", lost)
        if visit.evicted is None:
            return CacheMiss(MissReason.EVICTED, "no longer cached", lost)
        return CacheMiss(MissReason.EVICTED, f"evicted {now - visit.evicted:.0f} s ago", lost)

    def _first_visit(self, turn: Conversation, tokens: int) -> CacheMiss:
        known = (self._by_open_key.get(key) for key in turn.open_keys[1:])
        if any(visit is not None and visit.tenant != turn.tenant for visit in known):
            return CacheMiss(MissReason.ANOTHER_TENANT, "another tenant", tokens)
        return CacheMiss(MissReason.FIRST_VISIT, _FIRST_VISIT, tokens)

    def _find(self, turn: Conversation) -> Visit | None:
        """The turn that this one continues; else one with a recent answer of this one, and half of its messages.

        Of several of these, the one that has the longest beginning with this one in common.
        """
        for key in reversed(turn.keys[1:]):
            if key in self._by_key:
                return self._by_key[key]
        for place in turn.answers[: -_ANSWERS - 1 : -1]:
            visits = self._by_answer.get(turn.tenant + turn.digests[place], ())[-_SAME_ANSWER:]
            alike = [visit for visit in reversed(visits) if _alike(visit, turn)]
            if alike:
                return max(alike, key=lambda visit: _same_beginning(visit, turn))
        return None

    def _forget(self, visit: Visit) -> None:
        self._bytes -= visit.bytes
        for key in visit.keys:
            if self._by_key.get(key) is visit:
                del self._by_key[key]
        same = self._by_answer.get(visit.answer, [])
        if visit in same:
            same.remove(visit)
        if not same:
            self._by_answer.pop(visit.answer, None)
        if self._by_open_key.get(visit.open_key) is visit:
            del self._by_open_key[visit.open_key]
        if visit.blocks is not None and len(visit.blocks):
            last = int(visit.blocks[-1])
            self._watched[last].remove(visit)
            if not self._watched[last]:
                del self._watched[last]


def miss_since(visit: Visit, turn: Conversation, prompt: Mapping[HashScheme, PromptBlocks]) -> CacheMiss | None:
    """Where the prompt parts from that of the visit; None where it extends it."""
    size, blocks = _followed(prompt)
    had = len(visit.blocks) * visit.block_size if visit.blocks is not None else 0
    lost = had - _common(visit.blocks, blocks) * size
    changed = difference(visit, turn)
    if changed is not None:
        return CacheMiss(*changed, max(lost, 0))
    words = "the template wrote earlier messages differently"
    return CacheMiss(MissReason.REWRITTEN, words, lost) if lost > size else None


def difference(visit: Visit, turn: Conversation) -> tuple[MissReason, str] | None:
    """Where the turn parts from the visit, which it should extend; None where it extends it, or is a part of it."""
    if visit.tools != turn.tools:
        return MissReason.TOOLS_CHANGED, "the tools changed"
    for place, digest in enumerate(turn.digests[: len(visit.digests) // _DIGEST]):
        if visit.digests[place * _DIGEST : (place + 1) * _DIGEST] != digest:
            if place == 0 and visit.system:
                return MissReason.SYSTEM_CHANGED, "the system prompt changed"
            return MissReason.MESSAGE_CHANGED, f"message {place + 1} changed"
    return None


def _alike(visit: Visit, turn: Conversation) -> bool:
    """Whether the visit has half of the turn's messages, wherever."""
    known = {visit.digests[at : at + _DIGEST] for at in range(0, len(visit.digests), _DIGEST)}
    return 2 * sum(digest in known for digest in turn.digests) >= len(turn.digests)


def _same_beginning(visit: Visit, turn: Conversation) -> int:
    """How many messages both begin with; none where the tools differ."""
    if visit.tools != turn.tools:
        return 0
    for place, digest in enumerate(turn.digests):
        if visit.digests[place * _DIGEST : (place + 1) * _DIGEST] != digest:
            return place
    return len(turn.digests)


def _followed(prompt: Mapping[HashScheme, PromptBlocks]) -> tuple[int, Digests | None]:
    """The tokens of a block, and the digests of a prompt's blocks; 1 and None if no policy follows them."""
    for blocks in prompt.values():
        for group in blocks.groups:
            if group.snapshot is None:
                return blocks.block_size, group.digests
    return 1, None


def _common(first: Digests | None, second: Digests | None) -> int:
    """How many leading blocks are the same."""
    if first is None or second is None:
        return 0
    count = min(len(first), len(second))
    different = np.flatnonzero(first[:count] != second[:count])
    return int(different[0]) if len(different) else count
