"""Repetition, presence and frequency penalties.

The repetition penalty counts prompt and output, the other two the output alone. Only tokens that a row has seen can
change, so the work goes with its length, not with the vocabulary: their logits are gathered, changed and written back.
A token that occurs twice is computed twice with the same result.
"""

from dataclasses import dataclass

import torch

from headrace_worker.plan import RowInit
from headrace_worker.sampler.batch import SampleBatch


@dataclass(slots=True)
class _Row:
    repetition: float
    presence: float
    frequency: float
    slot: int  # line of the output counts; 0, which stays empty, for rows that need none
    counted: int  # positions below this are counted, or belong to the prompt


class PenaltyState:
    """Per row the three penalties; counts of output tokens [slots, V] int32 only for rows whose penalties need them."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._rows: dict[int, _Row] = {}
        self._counts = torch.zeros((1, vocab_size), dtype=torch.int32, device=device)
        self._free_slots: list[int] = []

    def init(self, init: RowInit) -> None:
        """Take a row's options over; outputs that it brings along are counted when it draws next."""
        sampling = init.sampling
        counting = sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        if counting or sampling.repetition_penalty != 1.0:
            self._rows[init.row] = _Row(
                sampling.repetition_penalty,
                sampling.presence_penalty,
                sampling.frequency_penalty,
                self._take_slot() if counting else 0,
                init.prompt_len,
            )

    def free(self, row: int) -> None:
        """Forget a row; its counts go to the next that needs some."""
        state = self._rows.pop(row, None)
        if state is not None and state.slot:
            self._free_slots.append(state.slot)

    def apply(self, batch: SampleBatch) -> bool:
        """Penalise seen tokens; True if any row has penalties."""
        users = batch.users(self._rows)
        if not users:
            return False
        states = [self._rows[batch.rows[i]] for i in users]
        self._count_new(batch, users, states)

        longest = max(batch.positions[i] for i in users)
        if not longest:
            return False
        lengths = batch.tensor([batch.positions[i] for i in users], torch.int64)[:, None]
        known = batch.token_rows[batch.tensor([batch.rows[i] for i in users], torch.int64), :longest].long()
        past_the_end = torch.arange(longest, device=known.device) >= lengths
        known = torch.where(past_the_end, known[:, :1], known)  # [A, longest]; padding repeats the first token

        where = batch.tensor(users, torch.int64)[:, None]
        repetition, presence, frequency = (
            batch.tensor([getattr(state, name) for state in states], torch.float32)[:, None]
            for name in ("repetition", "presence", "frequency")
        )
        values = batch.logits[where, known]
        values = torch.where(values > 0, values / repetition, values * repetition)
        slots = batch.tensor([state.slot for state in states], torch.int64)[:, None]
        counts = self._counts[slots, known]
        values = values - frequency * counts - presence * (counts > 0)
        batch.logits[where, known] = values
        return True

    def _count_new(self, batch: SampleBatch, users: list[int], states: list[_Row]) -> None:
        """Count the outputs that became known since a row drew last: normally the one token it drew then."""
        slots: list[int] = []
        rows: list[int] = []
        positions: list[int] = []
        for i, state in zip(users, states, strict=True):
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

    def counts_memory(self) -> int:
        """Bytes that the counts take now."""
        return self._counts.nbytes
