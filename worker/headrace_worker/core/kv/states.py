"""Slots with recurrent state: which one each request continues from. No tensors here.

A slot holds the states of all recurrent layers of a rank for one sequence at one position. Slot 0 is the state of
nothing. Each work item names the slot that it reads, and the one that it writes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace_worker.core.kv.blocks import BlockPool


@dataclass(slots=True)
class RequestState:
    """The slot of one running request; 0 before its first work."""

    slot: int = 0


class StateSlots:
    """The slots of a replica. Each running request has one of its own, so there are as many as rows at least."""

    def __init__(self, slots: int) -> None:
        """slots: with slot 0."""
        self.pool = BlockPool(slots)

    def advance(self, state: RequestState) -> tuple[int, int]:
        """The slots that the next work of the request reads and writes."""
        read = state.slot
        if not state.slot:
            state.slot = self.pool.allocate(1)[0]
        return read, state.slot

    def release(self, state: RequestState) -> None:
        """Work that is launched may still write the slot: later work of others, which follows it, reads another one."""
        if state.slot:
            self.pool.release([state.slot])
            state.slot = 0

    def check(self, running: Sequence[RequestState]) -> None:
        """Raises RuntimeError unless the slots in use are those of the running requests."""
        self.pool.check()
        held = [state.slot for state in running if state.slot]
        if len(set(held)) != len(held) or len(held) != self.pool.used:
            raise RuntimeError(f"requests hold {len(held)} slots, the pool counts {self.pool.used} used")
