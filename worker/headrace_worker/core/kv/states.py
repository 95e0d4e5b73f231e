"""Slots with recurrent state, and the snapshots among them that the prefix cache keeps. No tensors here.

A slot holds the states of all recurrent layers of a rank for one sequence at one position. Slot 0 is the state of
nothing. A *snapshot* is a slot with the state at the end of a block that nothing overwrites: requests start from it, as
they do from cached blocks. Each work item names the slot that it reads and those that it writes, so that neither a hit
nor a snapshot copies anything: work after a snapshot reads its slot, and writes another one.

A state is as large as the keys and values of hundreds to thousands of tokens. So few borders of blocks are kept: the
last one of a prompt, the last one of its answer, and those where requests part; and the newest one of a prompt that
takes several chunks, until its last one is there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from headrace_worker.core.kv.blocks import BlockPool, Content, Lineage
from headrace_worker.core.plan import Work

SLOTS_PER_ROW = 2  # that a running request needs: the one that it continues from, and the next one after a snapshot


@dataclass(slots=True)
class RequestState:
    """The slots of one running request. It holds one reference to `slot`, and one to each of `kept`."""

    position: int = 0  # to which its state is planned
    slot: int = 0  # with the state at that position
    frozen: bool = False  # it is a snapshot, or becomes one: the next work writes another slot
    kept: dict[int, int] = field(default_factory=dict)  # snapshots to publish: the slot, by the number of blocks
    borders: set[int] = field(default_factory=set)  # borders of the prompt that are kept, in blocks
    branches: set[int] = field(default_factory=set)  # kept borders where other requests part from this one
    prompt_len: int = 0
    origin: Lineage | None = None  # lineage of the snapshot that it started from, until superseded
    own: Lineage = field(default_factory=lambda: Lineage(0))

    def held(self) -> set[int]:
        """All slots that it holds a reference to."""
        return {self.slot, *self.kept.values()} - {0}


class StateSlots:
    """The slots of a replica: `SLOTS_PER_ROW` for each row at least."""

    def __init__(self, slots: int, rows: int, block_size: int) -> None:
        """slots: with slot 0."""
        self.pool = BlockPool(slots)
        self.rows = rows
        self._reserve = SLOTS_PER_ROW * rows
        self._block_size = block_size
        self._read: list[int] = []  # by the step that is planned, which holds a reference to each

    def begin(
        self, state: RequestState, prompt_len: int, tokens: int, snapshot: int, branch: int, *, again: bool = False
    ) -> None:
        """A request starts after `tokens` from a snapshot that `pool.find` returned, or from slot 0. again: preempted.

        branch: blocks whose keys and values others have left, with no snapshot at their end: the next request starts
        there; 0 = none.
        """
        if snapshot:
            self.pool.acquire(snapshot)
            content = self.pool.content(snapshot)
            state.slot, state.frozen = snapshot, True
            state.origin = content.lineage if content is not None else None
        state.position, state.prompt_len = tokens, prompt_len
        state.own = Lineage(prompt_len)
        if again and state.origin is not None and state.origin.prompt_len == prompt_len:
            state.own = state.origin
        # The next turn has other tokens at the end of this prompt, which open the answer.
        state.borders.add((prompt_len - 1) // self._block_size - 1)
        if branch:
            self._keep_branch(state, branch)

    def share(self, state: RequestState, first: int, most: int) -> int:
        """Blocks after which another request will start, which shares the first `most`: more than `first`, or 0.

        A snapshot is kept there if the state is not planned beyond it.
        """
        ahead: list[int] = []
        if self._has_room(state):
            if most * self._block_size > state.position:
                self._keep_branch(state, most)
                return most
            ahead = [blocks for blocks in state.borders if blocks * self._block_size > state.position]
        return max([blocks for blocks in (*state.kept, *ahead) if first < blocks <= most], default=0)

    def plan(self, work: Sequence[Work], states: Sequence[RequestState]) -> list[Work]:
        """The work of a step with the slots that it reads and writes."""
        planned = []
        for item, state in zip(work, states, strict=True):
            read, writes = self._advance(state, item.start, item.start + item.count)
            planned.append(replace(item, state_read=read, state_writes=writes))
        # Steps run in order: what this one reads may be overwritten by the next one.
        self.pool.release(self._read)
        self._read.clear()
        return planned

    def publish(self, state: RequestState, blocks: int, content: Content) -> None:
        """Publishes the kept snapshot after so many blocks: it was computed, and its tokens are known."""
        slot, shared = state.kept.pop(blocks), blocks in state.branches
        is_new = self.pool.publish(slot, content._replace(lineage=None if shared else state.own))
        self.pool.release([slot])
        if is_new and not shared:
            state.own.digests.append(content.digest)
        if state.own.newest:
            self.pool.discard(state.own.newest)
        state.own.newest = content.digest if is_new and blocks not in state.borders else b""
        self.pool.postpone(state.own.newest)
        if state.origin is not None and state.origin.prompt_len < state.prompt_len:
            for digest in state.origin.digests:  # the next turn starts from the new one
                self.pool.evict_next(digest)
            state.origin = None

    def reserve(self) -> int | None:
        """A slot for a state of another replica or of host memory; None unless enough are left for every row."""
        return self.pool.allocate(1)[0] if self.pool.available > self._reserve else None

    def hold(self, slot: int) -> bool:
        """Adds a reference to a slot in use or a snapshot, for another replica or a load; False if too few are left."""
        if self.pool.available <= self._reserve:
            return False
        self.pool.acquire(slot)
        return True

    def state_after(self, state: RequestState, blocks: int) -> int:
        """The slot with the state after so many blocks of a running request; 0 = there is none."""
        at_end = state.position == blocks * self._block_size
        return state.kept.get(blocks, state.slot if at_end else 0)

    def publish_read(self, slot: int, content: Content, prompt_len: int) -> None:
        """Publishes a state that was read from another replica, into a slot that `reserve` returned."""
        self.pool.publish(slot, content._replace(lineage=Lineage(prompt_len, [content.digest])))

    def release(self, state: RequestState) -> None:
        """Work that is launched may still write the slots: later work of others, which follows it, reads other ones."""
        self.pool.release([*state.kept.values(), *([state.slot] if state.slot else [])])
        state.slot, state.frozen = 0, False
        state.kept.clear()
        self.pool.resume(state.own.newest)

    def check(self, running: Sequence[RequestState], others: Sequence[int] = ()) -> None:
        """Raises RuntimeError unless the slots in use are those of the running requests, and all can go on.

        others: slots that transfers hold.
        """
        self.pool.check()
        held = set(others).union(*(state.held() for state in running))
        if len(held) != self.pool.used or self._read:
            raise RuntimeError(f"requests hold {len(held)} slots, the pool counts {self.pool.used} used")
        own = [state.slot for state in running if state.slot and not state.frozen]
        if len(set(own)) != len(own):
            raise RuntimeError("two requests write one slot")
        if sum(state.frozen or not state.slot for state in running) > self.pool.available:
            raise RuntimeError("a request has no slot to go on with")

    def _keep_branch(self, state: RequestState, blocks: int) -> None:
        state.borders.add(blocks)
        state.branches.add(blocks)

    def _advance(self, state: RequestState, start: int, end: int) -> tuple[int, tuple[tuple[int, int], ...]]:
        """The slot that work on positions [start, end) reads; the ends of its pieces, and the slot that each writes."""
        read, writes = state.slot, []
        for position in self._kept_borders(state, start, end):
            if not self._has_room(state):
                continue
            writes.append((position, self._write(state)))
            state.frozen = True
            self.pool.acquire(state.slot)
            state.kept[position // self._block_size] = state.slot
        if not writes or writes[-1][0] < end:
            writes.append((end, self._write(state)))
        state.position = end
        return read, tuple(writes)

    def _kept_borders(self, state: RequestState, start: int, end: int) -> Iterator[int]:
        """Positions in (start, end] whose state is kept: marked ones of the prompt, then the last one of a chunk of it
        that is not its last, and of the answer: a request that is preempted there goes on from it.
        """
        size = self._block_size
        last = end // size * size
        if last <= start:
            return
        yield from sorted(blocks * size for blocks in state.borders if start < blocks * size <= end)
        if not last < state.prompt_len <= end and last // size not in state.borders:
            yield last

    def _has_room(self, state: RequestState) -> bool:
        """Whether one more snapshot leaves two slots for every row, those that the planned step reads included."""
        return (not state.frozen and not state.kept) or self.pool.available > self._reserve

    def _write(self, state: RequestState) -> int:
        """The slot that the next piece writes."""
        if state.frozen or not state.slot:
            if state.slot:
                self._read.append(state.slot)
            state.slot, state.frozen = self.pool.allocate(1)[0], False
        return state.slot
