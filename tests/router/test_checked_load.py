"""Numbers that a replica reports are used only if they can be: one with a defect does not fail others' requests."""

import math

import pytest

from headrace_proto.replica_pb2 import Counters, Load, SourceSpeed, StepModel
from headrace_router.core.checked_load import MAX_SECONDS, MAX_SOURCES, MAX_UNIT_MS, checked_load
from headrace_router.core.policy import Predicted
from headrace_router.core.policy.view import COLUMNS
from support.router.candidates import FakeCandidate, plan, view_of, work

GOOD = Load(
    running=3,
    waiting_tokens=100,
    kv_usage=0.5,
    predicted_step_ms=12.0,
    step_model=StepModel(base_ms=10, per_prefill_token_ms=0.1, per_decode_sequence_ms=0.2, error_ms=1),
    counters=Counters(fetch_seconds=3.0, steps=9),
    sources=[SourceSpeed(address="a", per_token_ms=0.1)],
)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 1e12, 1e30, 1e305, 1.7e308])
@pytest.mark.parametrize(
    "field",
    ["kv_usage", "predicted_step_ms", "base_ms", "per_prefill_token_ms", "per_kv_token_ms", "error_ms", "fetch"],
)
def test_a_number_that_cannot_be_counts_as_not_known(field: str, value: float) -> None:
    load = Load()
    load.CopyFrom(GOOD)
    match field:
        case "kv_usage" | "predicted_step_ms":
            setattr(load, field, value)
        case "fetch":
            load.counters.fetch_seconds = load.sources[0].per_token_ms = value
        case _:
            setattr(load.step_model, field, value)
    checked = checked_load(load)
    row = view_of([FakeCandidate(checked)]).data
    assert all(math.isfinite(number) and number >= 0 for number in row.reshape(-1).tolist()) and len(row) == len(
        COLUMNS
    )
    assert 0 <= checked.sources[0].per_token_ms <= MAX_UNIT_MS and checked.counters.fetch_seconds <= MAX_SECONDS
    assert (checked.running, checked.waiting_tokens, checked.counters.steps) == (3, 100, 9)
    candidates = [FakeCandidate(checked, replica_id="bad"), FakeCandidate(GOOD)]
    for turn in range(100):  # whatever it reports, requests are placed
        assert plan(Predicted(), candidates, work(100_000 + turn, [0, 0])).target in (0, 1)


def test_a_load_without_a_defect_is_not_copied() -> None:
    assert checked_load(GOOD) is GOOD


def test_the_sources_of_a_load_are_bounded() -> None:
    load = Load(sources=[SourceSpeed(address=str(number)) for number in range(100_000)])
    assert len(checked_load(load).sources) == MAX_SOURCES
    assert len(load.sources) == 100_000
