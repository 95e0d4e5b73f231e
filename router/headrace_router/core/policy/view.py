"""Replicas as columns: one array per quantity, with an entry for each candidate, so that a decision costs few calls."""

from collections.abc import Sequence
from operator import attrgetter
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace_router.core.policy.candidate import Candidate

Column: TypeAlias = NDArray[np.float64]

# Each column by the attribute that it is read from: of a candidate, of its load, of the step model in it.
_OF_CANDIDATE = {
    "unreported": "unreported",  # requests that were sent, and are not in the reported load
    "queued_tokens": "queued_tokens",  # to compute, before those of the next request; those of `unreported` included
    "kv_tokens": "kv_tokens",  # in use
    "free_tokens": "free_tokens",  # that the cache has room for; 0 = not known
    "drops": "drops",  # 1: its cache is full, a new block replaces another one
    "rows": "rows",  # requests that run at the same time, at most; 0 = not known
    "step_tokens": "step_tokens",  # that one step computes, at most; 0 = not known
    "prefill": "is_prefill",  # 1: computes prompts for others; a candidate only where policies share roles
    "preempted_at": "preempted_at",  # when a request there was preempted
    "used_at": "used_at",  # when it last ran a request: how old its step model is
}
_OF_LOAD = {
    "running": "running",  # requests
    "waiting": "waiting",
    "kv_usage": "kv_usage",
    "last_step_ms": "predicted_step_ms",  # of the newest step
}
_OF_STEP_MODEL = {  # in seconds, as the replica has fitted them; 0 = not known
    "base": "base_ms",  # of a step; then per token or sequence
    "per_prefill_token": "per_prefill_token_ms",
    "per_decode_sequence": "per_decode_sequence_ms",
    "per_kv_token": "per_kv_token_ms",
    "error": "error_ms",  # that its predictions of a step are off
}
_ATTRIBUTES = _OF_CANDIDATE | _OF_LOAD | _OF_STEP_MODEL
COLUMNS = {name: place for place, name in enumerate(_ATTRIBUTES)}
"""The place of each column in a row."""

_read_candidate, _read_load, _read_step_model = (
    attrgetter(*attributes.values()) for attributes in (_OF_CANDIDATE, _OF_LOAD, _OF_STEP_MODEL)
)


def row(candidate: Candidate) -> tuple[float, ...]:
    """The entries of one candidate, in the order of COLUMNS."""
    load = candidate.load
    seconds = [milliseconds / 1e3 for milliseconds in _read_step_model(load.step_model)]
    return *_read_candidate(candidate), *_read_load(load), *seconds


class View:
    """Candidates of a decision, and their columns: `view.of("running")`.

    The columns are valid until the decision is made: they may be the table's own, which change with the next report.
    """

    __slots__ = ("candidates", "data")

    def __init__(self, candidates: Sequence[Candidate], data: NDArray[np.float64]) -> None:
        """data: [columns, candidates]."""
        self.candidates = candidates
        self.data = data

    def __len__(self) -> int:
        return len(self.candidates)

    def of(self, name: str) -> Column:
        """The column with this name."""
        column: Column = self.data[COLUMNS[name]]
        return column

    def at(self, places: Sequence[int]) -> "View":
        """Some of the candidates."""
        return View([self.candidates[place] for place in places], self.data[:, places])

    @property
    def requests(self) -> Column:
        """Requests that run, wait, or were sent."""
        requests: Column = self.of("running") + self.of("waiting") + self.of("unreported")
        return requests
