"""The step predictor fits the cost of steps, and stays within bounds for any observations."""

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_worker.core.latency import StepLatency

BASE, PER_PREFILL_TOKEN, PER_SEQUENCE, PER_KV_TOKEN = 2e-3, 4e-5, 1e-4, 1e-7


def seconds(prefill: int, sequences: int, kv: int) -> float:
    return BASE + PER_PREFILL_TOKEN * prefill + PER_SEQUENCE * sequences + PER_KV_TOKEN * kv


def test_coefficients_are_learned() -> None:
    random, latency = Random(1), StepLatency()
    for _ in range(3000):
        prefill = random.choice((0, 0, random.randrange(512)))
        sequences, kv = random.randrange(64), random.randrange(40_000)
        latency.observe(prefill, sequences, kv, seconds(prefill, sequences, kv) * random.uniform(0.9, 1.1))
    cost = latency.cost
    assert cost.per_prefill_token == pytest.approx(PER_PREFILL_TOKEN, rel=0.1)
    assert cost.per_decode_sequence == pytest.approx(PER_SEQUENCE, rel=0.2)
    for step in ((0, 1, 100), (0, 60, 30_000), (512, 0, 512), (300, 30, 9000)):
        assert cost.predict(*step) == pytest.approx(seconds(*step), rel=0.15)


@pytest.mark.parametrize("seed", range(4))
def test_a_replica_that_nearly_always_decodes_stays_accurate(seed: int) -> None:
    """Directions that are rarely excited must not grow with the decay: a regression after a thousand steps."""
    random, latency = Random(seed), StepLatency()
    for number in range(20_000):
        prefill = random.randrange(1, 400) if random.random() < 0.02 else 0
        sequences = random.randrange(1, 9)
        kv = sequences * random.randrange(20, 400)
        hiccup = 0.3 if random.random() < 0.001 else 0.0
        latency.observe(prefill, sequences, kv, seconds(prefill, sequences, kv) * random.uniform(0.8, 1.2) + hiccup)
        if number > 100:
            assert latency.cost.predict(prefill, sequences, kv) < 0.2


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1 << 20), st.integers(0, 4096), st.integers(0, 1 << 24), st.floats(0.0, 1e3, allow_nan=False)
        ),
        max_size=200,
    )
)
@settings(max_examples=150, deadline=None)
def test_every_history_gives_finite_predictions(steps: list[tuple[int, int, int, float]]) -> None:
    """Numbers stay finite and not negative; the prediction for the last step is bounded by the observed times."""
    latency = StepLatency()
    longest = max((step[3] for step in steps), default=0.0)
    for prefill, sequences, kv, took in steps:
        what = (prefill, sequences, kv)
        latency.observe(*what, took)
        cost = latency.cost
        parts = (cost.base, cost.per_prefill_token, cost.per_decode_sequence, cost.per_kv_token, cost.error)
        assert all(math.isfinite(part) and part >= 0 for part in parts)
        assert cost.predict(*what) <= 4 * longest + 1e-6


TIMED = [(0, 1, 129, seconds(0, 1, 129)), (128, 0, 128, seconds(128, 0, 128)), (0, 16, 2064, seconds(0, 16, 2064))]


def test_steps_timed_at_start_give_the_first_predictions() -> None:
    latency = StepLatency()
    latency.start(TIMED)
    for step in TIMED:
        assert latency.cost.predict(*step[:3]) == pytest.approx(step[3], rel=0.05)
    assert latency.cost.predict(0, 8, 1000) == pytest.approx(seconds(0, 8, 1000), rel=0.05)


@pytest.mark.parametrize("pause", [3.0, 10.0, 60.0])
def test_a_step_in_which_the_process_was_paused_is_not_taken_for_the_next_ones(pause: float) -> None:
    """SIGSTOP, a paused virtual machine: the router would not use the replica for minutes, and nothing correct it."""
    random, latency = Random(4), StepLatency()

    def step(more: float = 0.0) -> None:
        sequences, kv = random.randrange(1, 32), random.randrange(10_000)
        latency.observe(0, sequences, kv, seconds(0, sequences, kv) + more)

    for _ in range(1000):
        step()
    step(pause)
    assert latency.cost.predict(0, 16, 5000) == pytest.approx(seconds(0, 16, 5000), rel=0.1)
    for _ in range(40):  # whereas one that has become slow is seen soon
        step(10 * seconds(0, 16, 5000))
    assert latency.cost.predict(0, 16, 5000) > 1.5 * seconds(0, 16, 5000)
