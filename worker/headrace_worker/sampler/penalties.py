"""Repetition, presence and frequency penalties.

The repetition penalty counts prompt and output, the other two the output alone. Only logits of tokens that occur in a
row change, so the work depends on its length, not on the vocabulary: they are gathered, changed and written back.
A token that occurs twice is computed twice with the same result. Long rows are changed a few at a time: the memory of
many of them is needed for a moment only, and would be kept from the KV cache.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace_worker.core.plan import RowInit
from headrace_worker.device.staging import all_to_device
from headrace_worker.sampler.batch import SampleBatch

CHUNK_ELEMENTS = 1 << 22  # rows x tokens at a time, unless one row has more: about 200 MiB, mostly for int64 indices


@dataclass(slots=True)
class _Row:
    repetition: float
    presence: float
    frequency: float
    slot: int  # index into the output counts; 0, which stays empty, for rows that need none
    counted: int  # positions below this are counted, or belong to the prompt


class PenaltyState:
    """Per row the three penalties; counts of output tokens [slots, V] int32 only for rows whose penalties need them."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.rows: dict[int, _Row] = {}
        self._counts = torch.zeros((1, vocab_size), dtype=torch.int32, device=device)
        self._free_slots: list[int] = []

    def init(self, init: RowInit) -> None:
        """Store a row's options; outputs it already has are counted when it is sampled next."""
        sampling = init.sampling
        counting = sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        if counting or sampling.repetition_penalty != 1.0:
            self.rows[init.row] = _Row(
                sampling.repetition_penalty,
                sampling.presence_penalty,
                sampling.frequency_penalty,
                self._take_slot() if counting else 0,
                init.prompt_len,
            )

    def free(self, row: int) -> None:
        """Remove a row's options; its counts are reused for the next row that needs some."""
        state = self.rows.pop(row, None)
        if state is not None and state.slot:
            self._free_slots.append(state.slot)

    def apply(self, batch: SampleBatch) -> bool:
        """Penalise tokens that occur in a row; True if any row has penalties."""
        users = batch.users(self.rows)
        if not users:
            return False
        self._count_new(batch, users)
        users.sort(key=lambda i: batch.positions[i], reverse=True)  # rows of like length together: little padding
        positions = np.array([batch.positions[i] for i in users])
        states = [self.rows[batch.rows[i]] for i in users]
        rows = np.array([batch.rows[i] for i in users])
        factors = np.array([(state.repetition, state.presence, state.frequency) for state in states], np.float32)
        slots = np.array([state.slot for state in states])
        arrays = all_to_device([np.array(users)[:, None], rows, positions[:, None], factors, slots], batch.device)
        at = 0
        while at < len(users) and (longest := int(positions[at])):
            end = at + max(1, CHUNK_ELEMENTS // longest)
            self._penalize(batch, longest, bool(slots[at:end].any()), *(array[at:end] for array in arrays))
            at = end
        return True

    def _penalize(
        self,
        batch: SampleBatch,
        longest: int,
        counting: bool,
        where: Tensor,
        row: Tensor,
        length: Tensor,
        factors: Tensor,
        slot: Tensor,
    ) -> None:
        """Rows of at most `longest` tokens. where, length: [A, 1]; row, slot: [A]; factors: [A, 3].

        counting: whether any of them needs its outputs counted; a repetition penalty alone does not.
        """
        repetition, presence, frequency = factors[:, :, None].unbind(1)
        known = batch.token_rows[:, :longest].index_select(0, row)  # [A, longest]; padding repeats the first token
        known = known.where(torch.arange(longest, device=known.device) < length, known[:, :1])
        flat = batch.logits.view(-1)
        places = (known + where * batch.logits.shape[1]).view(-1)
        values = flat.index_select(0, places).view(known.shape)
        values = torch.where(values > 0, values / repetition, values * repetition)
        if counting:
            counts = self._counts[slot[:, None], known.long()]
            values = values - frequency * counts - presence * (counts > 0)
        flat.scatter_(0, places, values.view(-1))

    def _count_new(self, batch: SampleBatch, users: list[int]) -> None:
        """Count the outputs that became known since a row was last sampled: normally one token."""
        slots: list[int] = []
        rows: list[int] = []
        positions: list[int] = []
        for i in users:
            state = self.rows[batch.rows[i]]
            if state.slot and (new := range(state.counted, batch.positions[i])):
                slots += [state.slot] * len(new)
                rows += [batch.rows[i]] * len(new)
                positions += new
                state.counted = batch.positions[i]
        if slots:
            tokens = batch.token_rows[batch.tensor(rows, torch.int64), batch.tensor(positions, torch.int64)].long()
            ones = torch.ones(len(slots), dtype=torch.int32, device=tokens.device)
            self._counts.index_put_((batch.tensor(slots, torch.int64), tokens), ones, accumulate=True)

    def _take_slot(self) -> int:
        if not self._free_slots:
            used = self._counts.shape[0]
            more = torch.zeros_like(self._counts[:1]).expand(used, -1)
            self._counts = torch.cat((self._counts, more))  # doubles
            self._free_slots = list(range(used, 2 * used))
        slot = self._free_slots.pop()
        self._counts[slot] = 0
        return slot
