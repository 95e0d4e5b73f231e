"""The run of a choice, call by call: replicas that refuse, fail or stop during an answer; clients that disconnect."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from headrace_proto.control_pb2 import Member
from headrace_proto.replica_pb2 import (
    FINISH_CANCELLED,
    FINISH_LENGTH,
    FINISH_NONE,
    FINISH_REFUSED,
    Delta,
    FinishReason,
    ReplicaIdentity,
    Sampling,
    Submit,
    TokenLogprobs,
)
from headrace_router.core.attempt import Attempt, OnTokens, Outcome
from headrace_router.core.choice_run import SHARED_TOKENS, ChoiceRun
from headrace_router.core.errors import (
    DeadlineError,
    NoReplicaError,
    OverloadedError,
    ReplicaLostError,
    ReplicasLostError,
)
from headrace_router.core.placement import Decision, KvSource, MustWaitError, Placed
from headrace_router.core.policy import Prediction
from headrace_router.core.policy.interface import ChoiceRequest
from headrace_router.core.replica_state import ReplicaState
from headrace_router.core.retry import RETRY_SECONDS, RetryState

ANSWER = [7, 8, 9, 10]
PROMPT = [1, 2, 3]
PREDICTION = Prediction(1.0, 2.0, 0.5)


@dataclass
class Timer:
    at: float
    call: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


class Clock:
    """Virtual time."""

    def __init__(self) -> None:
        self.time = 0.0
        self.timers: list[Timer] = []

    def now(self) -> float:
        return self.time

    def soon(self, call: Callable[[], None]) -> Callable[[], None]:
        return self.after(0.0, call)

    def after(self, seconds: float, call: Callable[[], None]) -> Callable[[], None]:
        timer = Timer(self.time + seconds, call)
        self.timers.append(timer)
        return timer.cancel

    def run(self, seconds: float = 0.0) -> None:
        """Advances the time by `seconds` and runs the timers that are due."""
        end = self.time + seconds
        while due := [timer for timer in self.pending if timer.at <= end]:
            timer = min(due, key=lambda entry: entry.at)
            self.timers.remove(timer)
            self.time = max(self.time, timer.at)
            timer.call()
        self.time = end

    @property
    def pending(self) -> list[Timer]:
        return [timer for timer in self.timers if not timer.cancelled]


class FakeReplica(ReplicaState[None]):
    """The production state of a connected replica; what is sent to it is recorded at once."""

    def __init__(self, name: str) -> None:
        ids = itertools.count()
        member = Member(identity=ReplicaIdentity(replica_id=name), address="nowhere")
        super().__init__(
            member, clock=lambda: 0.0, new_id=lambda: f"{name}{next(ids)}".encode(), on_send=self._record_frame
        )
        self.connected = True
        self.submits: list[Submit] = []
        self.begun: list[Attempt] = []
        self.cancelled: list[bytes] = []

    def submit(self, submit: Submit, on_tokens: OnTokens, on_end: Callable[[Attempt], None], *cached: Any) -> Attempt:
        self.begun.append(super().submit(submit, on_tokens, on_end, *cached))
        return self.begun[-1]

    def answer(self, first: int, count: int, finish: FinishReason = FINISH_NONE) -> None:
        self.begun[-1].receive(Delta(first_index=first, token_ids=ANSWER[first : first + count], finish=finish))

    def _record_frame(self) -> None:
        frame = self.submit_queue.take()
        assert frame is not None
        self.submits += frame.submits
        self.cancelled += [cancel.attempt_id for cancel in frame.cancels]


class ChoiceOutput:
    """Token ids only. `stops_at`: the number of tokens after which the answer is complete, as after a stop string."""

    def __init__(self, stops_at: int | None) -> None:
        self.output_token_ids: list[int] = []
        self.failure: Exception | None = None
        self.done = False
        self._stops_at = stops_at

    def add(self, token_ids: Sequence[int], finish: int) -> None:
        self.output_token_ids += token_ids
        self.done = finish == FINISH_LENGTH or len(self.output_token_ids) == self._stops_at


class Scenario:
    """One run over named replicas, chosen in their order, and the events that it reports."""

    def __init__(
        self, *names: str, deadline: float | None = None, stops_at: int | None = None, migration_limit: int = 2
    ) -> None:
        self.clock = Clock()
        self.replicas = {name: FakeReplica(name) for name in names}
        self.prefill: FakeReplica | None = None
        self.events: list[str] = []
        self.decisions: list[Decision | None] = []
        self.results: list[Exception | None] = []
        self.broken: Exception | None = None
        self.output = ChoiceOutput(stops_at)
        request = ChoiceRequest("label", "m", "r", b"salt", PROMPT, Sampling(max_tokens=99), deadline_seconds=deadline)
        retry: RetryState[ReplicaState[None]] = RetryState(
            "m", max_attempts=3, migration_limit=migration_limit, patience=5.0
        )
        self.refuses = 0  # further calls of `place` that must wait
        self.run = ChoiceRun(request, self.output, self, retry, self.clock, (self,))
        self.run.begin()

    def __getitem__(self, name: str) -> FakeReplica:
        return self.replicas[name]

    # Placement
    def place(
        self,
        request: ChoiceRequest,
        output_tokens: int,
        excluded: Sequence[ReplicaState[None]],
        *,
        preferred: object = None,
        urgent: bool = False,
        sources: bool = True,
    ) -> Placed[None] | None:
        if self.refuses and not urgent:
            self.refuses -= 1
            raise MustWaitError
        if isinstance(preferred, FakeReplica) and preferred.connected:
            return Placed(preferred)
        for entry in self.replicas.values():
            if entry not in excluded and entry.connected:
                prefill = KvSource(self.prefill, cached_only=False) if self.prefill and sources else None
                return Placed(entry, prefill, 0, Decision(entry.replica_id, 2, 3, PREDICTION))
        return None

    def finished(self, request: ChoiceRequest, output_tokens: int) -> None:
        pass

    def sweep(self) -> None:
        pass

    # RunListener
    def placed(self, placed: Placed[Any]) -> None:
        self.events.append(f"at {placed.replica.replica_id}")
        self.decisions.append(placed.decision)

    def add_tokens(
        self, attempt: Attempt, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], finish: int, error: str
    ) -> None:
        if self.broken is not None:
            raise self.broken
        self.output.add(token_ids, finish)

    def left(self, replica_id: str, outcome: Outcome, begun: bool) -> None:
        self.events.append(f"{outcome.value} {replica_id}")

    def ended(self, attempt: Attempt | None, failure: Exception | None) -> None:
        self.results.append(failure)

    def nothing_left(self) -> bool:
        """Whether there is no timer, no open attempt, and no remote prompt."""
        attempts = [attempt for replica in self.replicas.values() for attempt in replica.attempts.values()]
        remote = sum(replica.remote_prompts.tokens for replica in self.replicas.values())
        return not self.clock.pending and not attempts and not remote


def test_a_complete_answer() -> None:
    scenario = Scenario("a", "b")
    scenario["a"].answer(0, 2)
    scenario["a"].answer(2, 2, FINISH_LENGTH)
    assert not scenario.results  # not inside the reading of a frame
    scenario.clock.run()
    assert scenario.results == [None] and scenario.output.output_token_ids == ANSWER and scenario.nothing_left()
    assert scenario["a"].cancelled == []  # the replica ended it itself


def test_a_stop_string_ends_the_attempt_at_the_replica() -> None:
    scenario = Scenario("a", stops_at=3)
    scenario["a"].answer(0, 3)
    scenario.clock.run()
    assert scenario.results == [None] and scenario["a"].cancelled == [b"a0"]


def test_a_refused_attempt_tries_the_next_replica_and_the_third_refusal_is_final() -> None:
    scenario = Scenario("a", "b", "c", "d")
    for name in "abc":
        scenario[name].begun[-1].receive(Delta(finish=FINISH_REFUSED))
        scenario.clock.run()
    assert scenario.events == ["at a", "refused a", "at b", "refused b", "at c"]
    assert isinstance(scenario.results[0], OverloadedError) and scenario.nothing_left()


def test_no_replica_before_the_first_token_is_an_error_at_once() -> None:
    assert isinstance(Scenario().results[0], NoReplicaError)


def test_a_lost_stream_continues_on_another_replica_and_fetches_its_blocks() -> None:
    scenario = Scenario("a", "b")
    scenario["a"].answer(0, 2)
    scenario["a"].begun[-1].receive(Delta(first_index=2, finish=FINISH_CANCELLED))
    scenario.clock.run()
    submit = scenario["b"].submits[0]
    assert list(submit.output_token_ids) == ANSWER[:2]
    assert submit.source.replica_id == "a" and submit.source.cached_only
    scenario["b"].answer(2, 2, FINISH_LENGTH)
    scenario.clock.run()
    assert scenario.results == [None] and scenario.output.output_token_ids == ANSWER
    assert scenario.events == ["at a", "lost a", "at b"]
    assert scenario.decisions == [
        Decision("a", 2, 3, PREDICTION),
        Decision("b", 2, 3, source_id="a"),  # a prediction would be of another way to get the blocks
    ]


def test_skipped_tokens_end_the_attempt_as_lost() -> None:
    scenario = Scenario("a", "b")
    scenario["a"].answer(0, 1)
    scenario["a"].answer(2, 1)
    scenario.clock.run()
    assert scenario["a"].cancelled == [b"a0"] and list(scenario["b"].submits[0].output_token_ids) == ANSWER[:1]


def test_a_stream_waits_a_bounded_time_for_a_replica() -> None:
    scenario = Scenario("a")
    scenario["a"].answer(0, 1)
    scenario["a"].connected = False
    scenario["a"].begun[-1].end(Outcome.LOST)
    scenario.clock.run(4.9)
    assert not scenario.results
    scenario.clock.run(0.2 + RETRY_SECONDS)
    assert isinstance(scenario.results[0], ReplicaLostError) and scenario.nothing_left()


def test_a_replica_that_comes_back_in_time_gets_the_stream() -> None:
    scenario = Scenario("a")
    scenario["a"].answer(0, 1)
    scenario["a"].connected = False
    scenario["a"].begun[-1].end(Outcome.LOST)
    scenario.clock.run(3.0)
    scenario["a"].connected = True
    scenario.clock.run(RETRY_SECONDS)
    scenario["a"].answer(1, 3, FINISH_LENGTH)
    scenario.clock.run()
    assert scenario.results == [None] and scenario.output.output_token_ids == ANSWER


def test_a_moved_stream_keeps_its_blocks_until_the_next_attempt_has_tokens() -> None:
    scenario = Scenario("a", "b")
    scenario["a"].answer(0, 2)
    scenario["a"].begun[-1].move()
    scenario.clock.run()
    assert scenario["a"].cancelled == [] and scenario["b"].submits[0].source.replica_id == "a"
    scenario["a"].answer(2, 1)  # sampled there meanwhile: dropped
    scenario["b"].answer(2, 1)
    assert scenario["a"].cancelled == [b"a0"]
    scenario["b"].answer(3, 1, FINISH_LENGTH)
    scenario.clock.run()
    assert scenario.output.output_token_ids == ANSWER and scenario.events[1] == "moved a"


@pytest.mark.parametrize("moment", ["placed", "tokens", "moving", "moved", "waiting", "ended"])
def test_everything_is_released_when_the_client_disconnects(moment: str) -> None:
    scenario = Scenario("a", "b", deadline=100.0)
    if moment != "placed":
        scenario["a"].answer(0, 1)
    if moment in ("moving", "moved"):
        scenario["a"].begun[-1].move()
    if moment == "moved":
        scenario.clock.run()
    if moment == "waiting":
        scenario["b"].connected = scenario["a"].connected = False
        scenario["a"].begun[-1].end(Outcome.LOST)
        scenario.clock.run(1.0)
    if moment == "ended":
        scenario["a"].answer(1, 3, FINISH_LENGTH)
    scenario.run.cancel()
    scenario.clock.run(200.0)
    assert scenario.run.ended and scenario.nothing_left() and not scenario.results
    ended_by_itself = moment == "ended"
    assert scenario["a"].cancelled == ([] if ended_by_itself else [b"a0"])
    assert scenario["b"].cancelled == ([b"b0"] if moment == "moved" else [])


def test_the_deadline_ends_the_run_and_frees_the_replica() -> None:
    scenario = Scenario("a", deadline=2.0)
    assert scenario["a"].submits[0].deadline_ms == 2000
    scenario["a"].answer(0, 1)
    scenario.clock.run(2.0)
    assert (
        isinstance(scenario.results[0], DeadlineError)
        and scenario["a"].cancelled == [b"a0"]
        and scenario.nothing_left()
    )


def test_an_error_of_the_listener_ends_only_this_run() -> None:
    scenario = Scenario("a")
    scenario.broken = ValueError("ours")
    scenario["a"].answer(0, 1)
    scenario.clock.run()
    assert scenario.results == [scenario.broken] and scenario["a"].cancelled == [b"a0"] and scenario.nothing_left()


def test_a_prompt_that_a_prefill_replica_computes_is_counted_there_until_the_first_token() -> None:
    scenario = Scenario("a", "b")
    scenario.prefill = FakeReplica("p")
    scenario["a"].begun[-1].receive(Delta(finish=FINISH_REFUSED))
    scenario.clock.run()
    assert scenario["b"].submits[0].source.replica_id == "p" and not scenario["b"].submits[0].source.cached_only
    assert scenario.prefill.remote_prompts.tokens == 3
    scenario["b"].answer(0, 1)
    assert scenario.prefill.remote_prompts.tokens == 0


def test_a_later_attempt_has_what_is_left_of_the_deadline() -> None:
    scenario = Scenario("a", "b", deadline=2.0)
    scenario["a"].answer(0, 1)
    scenario.clock.run(0.5)
    scenario["a"].begun[-1].end(Outcome.LOST)
    scenario.clock.run()
    assert scenario["b"].submits[0].deadline_ms == 1500


def test_a_choice_that_was_present_at_too_many_losses_is_not_run_again() -> None:
    scenario = Scenario("a", "b", "c", migration_limit=1)
    for name in "ab":
        scenario[name].identity.boot_id = name.encode()
        scenario[name].connected = False
        scenario[name].end_attempts()
        scenario.clock.run()
    assert isinstance(scenario.results[0], ReplicasLostError) and scenario.nothing_left()
    assert not scenario["c"].submits


def test_a_process_whose_connection_breaks_twice_is_one_loss() -> None:
    scenario = Scenario("a", migration_limit=1)
    for tokens in range(3):
        scenario["a"].answer(tokens, 1)
        scenario["a"].end_attempts()
        scenario.clock.run(5.0)
    assert len(scenario["a"].submits) == 4 and not scenario.results


def test_a_drain_is_no_loss() -> None:
    scenario = Scenario("a", "b", "c", migration_limit=0)
    for name in "ab":
        scenario[name].load.draining = True
        scenario[name].connected = False
        scenario[name].end_attempts()
        scenario.clock.run()
    assert scenario["c"].submits and not scenario.results


def test_a_moved_stream_continues_on_the_replica_that_it_was_moved_to() -> None:
    scenario = Scenario("a", "b", "c")
    scenario["a"].answer(0, 2)
    scenario["a"].begun[-1].move(scenario["c"])
    scenario.clock.run()
    assert scenario.events == ["at a", "moved a", "at c"]
    scenario["c"].answer(2, 2, FINISH_LENGTH)
    scenario.clock.run()
    assert scenario.results == [None]


def test_a_stream_waits_while_its_replicas_continue_others() -> None:
    scenario = Scenario("a", "b")
    scenario["a"].answer(0, 2)
    scenario.refuses = 3
    scenario["a"].begun[-1].end(Outcome.LOST)
    scenario.clock.run(0.2)
    assert not scenario["b"].submits
    scenario.clock.run(1.0)
    assert scenario["b"].submits


def test_a_stream_is_urgent_before_its_patience_ends() -> None:
    """Replicas that continue others for long must not end it."""
    scenario = Scenario("a", "b")
    scenario["a"].answer(0, 2)
    scenario.refuses = 1000
    scenario["a"].begun[-1].end(Outcome.LOST)
    scenario.clock.run(2.4)
    assert not scenario["b"].submits
    scenario.clock.run(2.4)
    assert scenario["b"].submits and not scenario.results


class Siblings:
    """The choices of one prompt; the further ones follow the first."""

    def __init__(self, prompt: int, *names: str, count: int = 2) -> None:
        self.first = Scenario(*names)
        self.first.run.cancel()
        self.clock, self.first.results = self.first.clock, []
        request = ChoiceRequest("label", "m", "r", b"salt", [1] * prompt, Sampling(max_tokens=9999))
        self.first.replicas["a"].begun.clear()
        self.first.replicas["a"].submits.clear()
        self.runs: list[ChoiceRun[None]] = []
        for output in (self.first.output, *(ChoiceOutput(None) for _ in range(count - 1))):
            retry: RetryState[ReplicaState[None]] = RetryState("m", max_attempts=3, migration_limit=3, patience=5.0)
            leader = self.runs[0] if self.runs else None
            self.runs.append(ChoiceRun(request, output, self.first, retry, self.clock, (self.first,), leader))
        for run in self.runs:
            run.begin()


def test_further_choices_wait_until_the_first_has_computed_the_prompt() -> None:
    siblings = Siblings(SHARED_TOKENS, "a", "b")
    replica = siblings.first["a"]
    siblings.clock.run(1.0)
    assert len(replica.submits) == 1
    replica.answer(0, 1)
    siblings.clock.run()
    assert len(replica.submits) == 2 and not replica.submits[1].HasField("source")


def test_the_choices_of_a_short_prompt_start_at_once_on_one_replica() -> None:
    siblings = Siblings(SHARED_TOKENS - 1, "a", "b")
    assert len(siblings.first["a"].submits) == 2


@pytest.mark.parametrize("event", ["fails", "cancelled"])
def test_further_choices_end_with_the_first(event: str) -> None:
    siblings = Siblings(SHARED_TOKENS, "a")
    if event == "fails":
        siblings.first["a"].begun[-1].receive(Delta(finish=FINISH_REFUSED))
        siblings.clock.run()
        assert [type(result) for result in siblings.first.results] == [OverloadedError] * 2
    else:
        for run in siblings.runs:
            run.cancel()
        siblings.clock.run()
    assert all(run.ended for run in siblings.runs) and siblings.first.nothing_left()
    assert len(siblings.first["a"].submits) == 1
