"""Replicas as policies read them, and work to place."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from headrace_proto.replica_pb2 import Load, Sampling
from headrace_router.core.policy.interface import (
    COLUMNS,
    Candidate,
    ChoiceRequest,
    Mode,
    PlacementTask,
    Policy,
    RequestPlacement,
    Tokens,
    View,
    row,
)
from headrace_router.core.policy.predicted import LEAST_TOKENS


@dataclass
class FakeCandidate:
    load: Load = field(default_factory=Load)
    remote_prompt_tokens: int = 0
    replica_id: str = "r"
    address: str = "10.0.0.1:1"
    generation: int = 1
    unreported: int = 0
    unreported_tokens: int = 0
    kv_tokens: float = 0.0
    free_tokens: float = 0.0
    drops: bool = False
    rows: int = 0
    step_tokens: int = 0
    used_at: float = 0.0
    preempted_at: float = -inf
    is_prefill: bool = False

    @property
    def queued_tokens(self) -> int:
        return self.load.waiting_tokens + self.unreported_tokens + self.remote_prompt_tokens

    @property
    def build(self) -> tuple[str, int]:
        return self.replica_id, self.generation


def work(
    tokens: int,
    cached: Sequence[int],
    *,
    sources_cached: Sequence[int] = (),
    held: Sequence[int] | None = None,
    offloaded: Sequence[int] | None = None,
    answer: float = 1.0,
    mode: Mode = "auto",
    session: str = "",
) -> PlacementTask:
    """A prompt of so many tokens; `cached` in each candidate's cache, `held` already, `offloaded` on disk."""

    def array(values: Sequence[int]) -> Tokens:
        return np.array(values, np.int64)

    request = ChoiceRequest("label", "m", "r", b"", [5] * tokens, Sampling(max_tokens=1), session=session)
    return PlacementTask(
        request,
        0,
        array(cached),
        array([0] * len(cached) if offloaded is None else offloaded),
        array(cached if held is None else held),
        array(sources_cached),
        answer,
        mode,
        LEAST_TOKENS,
    )


def view_of(candidates: Sequence[Candidate]) -> View:
    """From the candidates themselves, as they are now."""
    data = np.array([row(candidate) for candidate in candidates], np.float64).reshape(-1, len(COLUMNS))
    return View(candidates, data.T)


def plan(
    policy: Policy, candidates: Sequence[FakeCandidate], of: PlacementTask, sources: Sequence[FakeCandidate] = ()
) -> RequestPlacement:
    return policy.plan(view_of(candidates), view_of(sources), of)
