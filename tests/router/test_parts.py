"""Unit tests of small parts: policies, counters, JSON, order of an attempt's tokens, choices, the queue of submits."""

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from headrace_proto.replica_pb2 import (
    FINISH_LENGTH,
    FINISH_NONE,
    FINISH_STOP,
    Counters,
    Delta,
    Load,
    Sampling,
    StepModel,
    Submit,
    TokenLogprobs,
)
from headrace_router.api.http.body import JsonError, parse_json
from headrace_router.config import RouterSettings
from headrace_router.core.attempt import Attempt, Outcome, SubmitQueue
from headrace_router.core.policy import LeastLoad, PlacementTask, Policy, Predicted, RoundRobin, Session
from headrace_router.core.policy.interface import ChoiceRequest
from headrace_router.dispatch.choice import Choice
from headrace_router.dispatch.replica_metrics import ReplicaCounters
from headrace_router.text.model_card import LoadedTokenizer, ModelCard
from support.router.candidates import FakeCandidate as Candidate
from support.router.candidates import plan, work

REQUEST = ChoiceRequest("label", "m", "r", b"", (5,), Sampling(max_tokens=1))


def targets(policy: Policy, candidates: list[Candidate], of: PlacementTask, count: int = 9) -> list[int]:
    return [plan(policy, candidates, of).target for _ in range(count)]


def test_least_load_counts_running_waiting_and_unreported() -> None:
    candidates = [
        Candidate(load=Load(running=3)),
        Candidate(load=Load(running=1, waiting=1), unreported=2),
        Candidate(load=Load(running=2)),
    ]
    assert targets(LeastLoad(), candidates, work(1, [0] * 3)) == [2] * 9


def test_equal_replicas_are_chosen_in_rotation() -> None:
    policies: list[Policy] = [LeastLoad(), Predicted(), RoundRobin(), Session()]
    for policy in policies:
        chosen = targets(policy, [Candidate() for _ in range(3)], work(1, [0] * 3))
        assert sorted(chosen) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_predictions_that_differ_by_less_than_their_errors_are_equal() -> None:
    """Otherwise the replica whose last steps happened to be the fastest would get all requests."""
    models = [StepModel(base_ms=base, per_prefill_token_ms=1, error_ms=200) for base in (1.0, 1.1, 1.2)]
    candidates = [Candidate(load=Load(step_model=model)) for model in models]
    policy = Predicted()
    assert sorted(targets(policy, candidates, work(1, [0] * 3))) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert set(targets(policy, candidates, work(17, [0, 0, 16]))) == {2}, "where its prefix is"


def test_counters_never_decrease() -> None:
    counters = ReplicaCounters()
    totals = [
        counters.totals(("m", "r"), boot, Counters(generation_tokens=count))[1]
        for boot, count in [(b"1", 5), (b"1", 9), (b"2", 1), (b"2", 4), (b"3", 0)]
    ]
    assert totals == [5, 9, 10, 13, 13]


def test_counters_of_two_builds_at_the_same_time_add_up() -> None:
    counters = ReplicaCounters()
    totals = [
        counters.totals(("m", "r"), boot, Counters(generation_tokens=count))[1]
        for boot, count in [(b"1", 5), (b"2", 1), (b"1", 8), (b"2", 3), (b"3", 2), (b"2", 4)]
    ]
    assert totals == [5, 6, 9, 11, 13, 14]


def test_json_depth_is_counted_exactly() -> None:
    assert parse_json(b'{"a":[{"b":1}]}', 3) == {"a": [{"b": 1}]}
    with pytest.raises(JsonError):
        parse_json(b'{"a":[{"b":1}]}', 2)


def test_an_attempt_drops_repeats_and_refuses_gaps() -> None:
    seen: list[int] = []
    cancelled: list[bytes] = []
    ended: list[Attempt] = []
    attempt = Attempt(b"a", 2, lambda ids, *_: seen.extend(ids), ended.append, cancelled.append)
    attempt.receive(Delta(first_index=2, token_ids=[10, 11]))
    attempt.receive(Delta(first_index=2, token_ids=[10, 11]))
    attempt.receive(Delta(first_index=3, token_ids=[11, 12]))
    assert seen == [10, 11, 12] and attempt.open and not ended
    attempt.receive(Delta(first_index=6, token_ids=[13]))
    assert attempt.outcome is Outcome.LOST and cancelled == [b"a"] and ended == [attempt]
    attempt.receive(Delta(first_index=5, token_ids=[99]))
    assert seen == [10, 11, 12] and ended == [attempt]


def test_an_attempt_refuses_more_tokens_than_were_requested() -> None:
    seen: list[int] = []
    attempt = Attempt(b"a", 2, lambda ids, *_: seen.extend(ids), lambda _: None, lambda _: None, 5)
    attempt.receive(Delta(first_index=2, token_ids=[10, 11]))
    attempt.receive(Delta(first_index=3, token_ids=[11, 12]))
    assert seen == [10, 11, 12] and attempt.open
    attempt.receive(Delta(first_index=5, token_ids=[13]))
    assert attempt.outcome is Outcome.LOST and attempt.skipped and seen == [10, 11, 12]


@pytest.fixture(scope="module")
def card(tokenizer: Any) -> ModelCard:
    from headrace_proto.replica_pb2 import ModelFacts

    return ModelCard(ModelFacts(max_model_len=100, vocab_size=400), LoadedTokenizer(tokenizer.to_str().encode()))


def _choice(card: ModelCard, stop: tuple[str, ...] = (), **sampling: Any) -> Choice:
    return Choice(replace(REQUEST, sampling=Sampling(**sampling)), card, stop)


def test_stop_strings_are_ignored_before_min_tokens(card: ModelCard) -> None:
    ids = [card.encoder.encode_prompt(letter)[0] for letter in "abab"]
    choice = _choice(card, stop=("b",), min_tokens=3)
    update = choice.consume(ids, (), FINISH_NONE, "")
    assert update is not None and (update.text, update.finish_reason) == ("aba", "stop")
    assert len(choice.output_token_ids) == 4


def test_held_back_text_is_sent_at_the_end(card: ModelCard) -> None:
    ids = card.encoder.encode_prompt("abc")
    choice = _choice(card, stop=("bcd",))
    first = choice.consume(ids, (), FINISH_NONE, "")
    last = choice.consume([], (), FINISH_LENGTH, "")
    assert last is not None
    assert (first.text if first else "") + last.text == "abc" and last.finish_reason == "length"
    assert (first.token_ids if first else []) + last.token_ids == ids


def test_an_incomplete_character_at_the_end_is_dropped(card: ModelCard) -> None:
    ids = card.encoder.encode_prompt("a🙂")
    choice = _choice(card)
    update = choice.consume(ids[:-1], (), FINISH_LENGTH, "")
    assert update is not None and "\ufffd" not in update.text and update.finish_reason == "length"


def test_the_ending_token_is_counted_without_text(card: ModelCard) -> None:
    (token_id,) = card.encoder.encode_prompt("a")
    choice = _choice(card)
    update = choice.consume([token_id, token_id], (), FINISH_STOP, "")
    assert update is not None and update.text == "a" and len(choice.output_token_ids) == 2


def test_a_cancel_is_never_sent_before_its_submit() -> None:
    put: list[None] = []
    queue = SubmitQueue(lambda: put.append(None))
    assert queue.take() is None
    queue.submit(Submit(attempt_id=b"early"))
    queue.submit(Submit(attempt_id=b"late"))
    queue.cancel(b"early")
    first = queue.take()
    queue.cancel(b"late")
    second = queue.take()
    assert first is not None and second is not None and len(put) == 3
    assert [submit.attempt_id for submit in first.submits] == [b"late"] and not first.cancels
    assert [cancel.attempt_id for cancel in second.cancels] == [b"late"] and not second.submits
    assert queue.take() is None


def test_logprobs_of_repeated_tokens_are_dropped_with_them() -> None:
    seen: list[tuple[int, float]] = []

    def on_tokens(token_ids: Any, logprobs: Any, finish: int, error: str) -> None:
        seen.extend(zip(token_ids, (entry.logprob for entry in logprobs), strict=True))

    attempt = Attempt(b"a", 0, on_tokens, lambda _: None, lambda _: None)
    for first, count in ((0, 2), (1, 2)):
        entries = [TokenLogprobs(logprob=float(-index)) for index in range(first, first + count)]
        attempt.receive(Delta(first_index=first, token_ids=list(range(first, first + count)), logprobs=entries))
    assert seen == [(0, 0.0), (1, -1.0), (2, -2.0)] and attempt.open


@pytest.mark.parametrize("name", ["round_robin", "round-robin", "least_load"])
def test_a_policy_may_be_written_as_other_servers_write_it(name: str) -> None:
    assert RouterSettings(policy=name).policy == name.replace("_", "-")
    with pytest.raises(ValidationError, match="policy"):
        RouterSettings(policy="best")
