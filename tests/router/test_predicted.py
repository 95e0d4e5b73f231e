"""Placement by predicted seconds: where a request runs, and where its prompt is computed."""

from typing import Any

from headrace_proto.replica_pb2 import Load, SourceSpeed, StepModel
from headrace_router.core.policy import Predicted, Session
from support.router.candidates import FakeCandidate, plan, work


def replica(name: str = "r", **options: Any) -> FakeCandidate:
    """1 ms per prompt token, 10 ms per step."""
    load = options.pop("load", {})
    model = StepModel(base_ms=10, per_prefill_token_ms=1, per_decode_sequence_ms=0.1)
    return FakeCandidate(Load(step_model=model, **load), replica_id=name, address=name, step_tokens=512, **options)


def test_a_cached_prefix_is_worth_a_queue_that_is_shorter_than_the_prefix() -> None:
    for queued, expected in ((500, 0), (1500, 1)):
        holder = replica(load={"waiting_tokens": queued})
        assert plan(Predicted(), [holder, replica()], work(1000, [900, 0], held=[0, 0])).target == expected


def test_loading_a_prefix_costs_what_was_measured() -> None:
    """Host memory or disk: between what is in the cache and what must be computed."""
    near, far = replica(load={"load_token_ms": 0.1}), replica()

    def chosen(slow: float, other: int) -> int:
        loading = replica(load={"load_token_ms": slow})
        of = work(1000, [900, other], held=[0, 0], offloaded=[900, 0])
        return plan(Predicted(), [loading, replica()], of).target

    of = work(1000, [900, 900], held=[0, 0], offloaded=[900, 0])
    assert plan(Predicted(), [near, far], of).target == 1, "one of the two has it in its cache"
    assert [chosen(0.1, other) for other in (0, 500, 880)] == [0, 0, 1]
    assert [chosen(0.8, other) for other in (0, 500)] == [0, 1]
    slow = [replica(load={"load_token_ms": 5.0})]
    prediction = plan(Predicted(), slow, work(1000, [900], held=[0], offloaded=[900])).prediction
    assert prediction is not None and prediction.first_token >= 1.0, "it is computed"


def test_waiting_requests_make_computing_again_dearer() -> None:
    """As many as wait now come after it: each of them would wait for the prompt."""
    queue = {"waiting": 8, "waiting_tokens": 1500}
    assert (
        plan(
            Predicted(),
            [replica(load=queue), replica(load=queue | {"waiting_tokens": 100})],
            work(1000, [900, 0], held=[0, 0]),
        ).target
        == 0
    )


def test_a_prefix_is_fetched_if_its_holder_is_busy() -> None:
    speeds = [SourceSpeed(address="a", per_token_ms=0.01)]
    holder = replica("a", load={"running": 9, "waiting": 9, "waiting_tokens": 5000})
    chosen = plan(Predicted(), [holder, replica("b", load={"sources": speeds})], work(2000, [1900, 0]))
    assert (chosen.target, chosen.holder, chosen.source) == (1, 0, None)
    slow = [SourceSpeed(address="a", per_token_ms=5.0)]
    chosen = plan(Predicted(), [holder, replica("b", load={"sources": slow})], work(2000, [1900, 0]))
    assert (chosen.target, chosen.holder) == (1, None), "computing is faster than this link"
    chosen = plan(Predicted(), [holder, replica("b", load={"sources": speeds})], work(2000, [1900, 0], held=[0, 0]))
    assert (chosen.target, chosen.holder) == (1, None), "it is not computed yet"


def test_a_prefill_replica_computes_what_would_delay_many() -> None:
    busy = replica("a", load={"running": 20, "sources": [SourceSpeed(address="p", per_token_ms=0.01)]})
    of = work(2000, [0], sources_cached=[0])
    assert plan(Predicted(), [busy], of, [replica("p")]).source == 0
    assert plan(Predicted(), [busy], of, [replica("p", load={"waiting_tokens": 200_000})]).source is None
    idle = replica("a", load={"sources": [SourceSpeed(address="p", per_token_ms=0.01)]})
    assert plan(Predicted(), [idle], of, [replica("p")]).source is None
    always = work(2000, [0], sources_cached=[0], mode="always")
    assert plan(Predicted(), [idle], always, [replica("p")]).source == 0


def test_a_full_cache_makes_computing_and_fetching_dearer() -> None:
    """What is dropped for it must be computed again for others."""
    queue = {"running": 4, "waiting_tokens": 1800}
    other = replica("b", load={"running": 1})
    candidates = [replica("a", load=queue), other]
    of = work(1000, [900, 0], held=[0, 0])
    assert plan(Predicted(), candidates, of).target == 1
    other.drops = True
    other.load.running = 2
    assert plan(Predicted(), candidates, of).target == 0


def test_a_replica_without_memory_for_it_is_slow() -> None:
    full = replica("a", free_tokens=500.0, kv_tokens=10_000.0, load={"running": 1})
    room = replica("b", free_tokens=50_000.0, kv_tokens=10_000.0, load={"running": 1})
    assert plan(Predicted(), [full, room], work(2000, [0, 0], answer=200)).target == 1


def test_a_replica_that_has_fitted_nothing_is_like_the_others() -> None:
    new = FakeCandidate(Load(running=9), replica_id="new", address="new")
    assert plan(Predicted(), [replica(load={"running": 1}), new], work(100, [0, 0])).target == 0
    chosen = plan(Predicted(), [new, new], work(100, [0, 0]))
    assert chosen.prediction is not None and chosen.prediction.first_token > 0


def test_a_session_stays_on_its_replica() -> None:
    policy = Session()
    candidates = [replica(f"r{number}") for number in range(5)]
    homes = {}
    for number in range(50):
        of = work(8, [0] * 5, session=f"s{number}")
        homes[number] = plan(policy, candidates, of).target
        assert plan(Session(), candidates, of).target == homes[number], "every router chooses the same"
    assert len(set(homes.values())) == 5
    left = candidates[:4]
    for number, home in homes.items():
        if home < 4:
            assert plan(policy, left, work(8, [0] * 4, session=f"s{number}")).target == home


def test_a_replica_that_seems_slow_and_is_not_used_is_tried_again() -> None:
    """Its model may be of a slow moment: one of so many requests corrects it, of those that no cache has."""
    policy = Predicted()
    slow = StepModel(base_ms=20, per_prefill_token_ms=2, per_decode_sequence_ms=0.2)
    idle = FakeCandidate(Load(step_model=slow), replica_id="b", address="b", step_tokens=512, used_at=90.0)
    used = replica("a", used_at=100.0)

    def targets(cached: int, candidates: list[FakeCandidate]) -> list[int]:
        of = work(400, [cached, 0], answer=50.0)
        return [plan(policy, candidates, of).target for _ in range(100)]

    assert targets(0, [used, idle]).count(1) == 4
    assert targets(390, [used, idle]).count(1) == 0, "it has the prompt"
    idle.used_at = 99.0
    assert targets(0, [used, idle]).count(1) == 0, "its model is new"
    idle.used_at, idle.unreported = 90.0, 1
    assert targets(0, [used, idle]).count(1) == 0, "it is measured now"
    idle.used_at, idle.unreported = 60.0, 0
    assert targets(390, [used, idle]).count(1) == 4, "in a cluster whose prompts are all cached, too, after a while"


def test_a_long_prompt_reads_the_context_again_in_each_step() -> None:
    """A replica that only computes prompts fits attention as seconds per token of the context."""
    model = StepModel(base_ms=10, per_prefill_token_ms=0.1, per_kv_token_ms=0.05)

    def source(name: str) -> FakeCandidate:
        return FakeCandidate(Load(step_model=model), replica_id=name, address=name, step_tokens=512)

    of = work(5120, [0], sources_cached=[0], mode="always")
    chosen = plan(Predicted(), [replica("a", load={"running": 1})], of, [source("p")])
    assert chosen.source == 0 and chosen.prediction is not None
    computed = 0.1 + 5120 * 0.1e-3 + sum(512 * step for step in range(1, 11)) * 0.05e-3
    assert computed < chosen.prediction.first_token < 1.2 * computed
    alone = plan(Predicted(), [source("p")], work(5120, [0])).prediction
    assert alone is not None and abs(alone.first_token - computed) < 0.15 * computed


def test_a_prefill_replica_answers_if_those_that_decode_are_busy() -> None:
    """As a candidate; and never as its own source."""
    for running, expected in ((0, 0), (30, 1)):
        candidates = [replica("d", load={"running": running}), replica("p", is_prefill=True)]
        chosen = plan(Predicted(), candidates, work(2000, [0, 0], sources_cached=[0], answer=50), candidates[1:])
        assert (chosen.target, chosen.source) == (expected, None)


def test_a_prefill_replica_must_be_faster_by_a_share_with_a_fetched_prefix_too() -> None:
    holder = replica("h", load={"running": 9, "waiting": 9, "waiting_tokens": 50_000})
    of = work(2000, [1900, 0, 0], answer=50)

    def model(share: float) -> FakeCandidate:
        step = StepModel(base_ms=10 * share, per_prefill_token_ms=share, per_decode_sequence_ms=0.1 * share)
        return FakeCandidate(Load(step_model=step), replica_id="p", address="p", step_tokens=512, is_prefill=True)

    for share, expected in ((0.98, 1), (0.9, 2)):
        chosen = plan(Predicted(), [holder, replica("d"), model(share)], of)
        assert (chosen.target, chosen.holder) == (expected, 0)
        assert chosen.costs is not None and abs(chosen.costs[2] / chosen.costs[1] - share) < 1e-6, "without the share"


def test_a_replica_that_only_computed_prompts_has_no_cost_of_decoding() -> None:
    """Its fit takes what prompts need beyond their tokens for the time of reading the KV cache."""
    model = StepModel(per_prefill_token_ms=1, per_kv_token_ms=0.5)
    prefill = FakeCandidate(Load(step_model=model, running=1), replica_id="p", kv_tokens=4000.0, step_tokens=512)
    decoding = StepModel(base_ms=10, per_prefill_token_ms=1, per_decode_sequence_ms=0.1, per_kv_token_ms=0.0001)
    others = [
        FakeCandidate(Load(step_model=decoding, running=9), replica_id=name, kv_tokens=9000.0, step_tokens=512)
        for name in "ab"
    ]
    assert plan(Predicted(), [*others, prefill], work(500, [0, 0, 0], answer=100)).target == 2
