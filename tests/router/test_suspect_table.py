"""Requests that were present when replicas were lost: trials, refusals and their end."""

from random import Random

import pytest

from headrace_proto.control_pb2 import Member
from headrace_proto.replica_pb2 import ReplicaFrame, ReplicaIdentity, Sampling
from headrace_proto.trial import TRIAL_SECONDS, TRIAL_TOKENS, WHOLE_ANSWER
from headrace_router.core.choice_losses import ChoiceLosses
from headrace_router.core.choice_request import ChoiceRequest
from headrace_router.core.errors import PoisonousRequestError
from headrace_router.core.replica_state import ReplicaState
from headrace_router.core.suspect_table import MAX_FINGERPRINTS, SUSPECT_SECONDS, SuspectTable, fingerprint

POISON, INNOCENT = [1, 2, 3], [4, 5, 6]


class Losses:
    """A table of suspects, and choices whose replicas are lost."""

    def __init__(self) -> None:
        self.now = 0.0
        self.suspects = SuspectTable(lambda: self.now)

    def choice(self, prompt: list[int]) -> ChoiceLosses[None]:
        return ChoiceLosses(self.suspects, ChoiceRequest("", "m", "r", b"", prompt, Sampling()))

    def choices(self, prompt: list[int], count: int) -> list[ChoiceLosses[None]]:
        return [self.choice(prompt) for _ in range(count)]

    def replica(self, name: str, boot_id: bytes = b"first") -> ReplicaState[None]:
        identity = ReplicaIdentity(replica_id=name, boot_id=boot_id)
        state: ReplicaState[None] = ReplicaState(
            Member(identity=identity), clock=lambda: self.now, new_id=lambda: b"x", on_send=lambda: None
        )
        state.receive(ReplicaFrame(hello=identity))
        return state

    def lose(self, name: str, *choices: ChoiceLosses[None]) -> ReplicaState[None]:
        replica = self.replica(name)
        replica.disconnect()
        for choice in choices:
            choice.start(replica, name.encode(), 0, alone=choice.alone, now=self.now)
            choice.end_attempt()
            choice.add(replica, 0)
        return replica

    def lose_beside_others(self, name: str, choice: ChoiceLosses[None], output_tokens: int) -> None:
        """The replica is lost where the choice runs, which passed its trial before."""
        choice.start(self.replica(name), name.encode(), 0, alone=False, now=self.now)
        choice.end_attempt(output_tokens)
        choice.add(self.replica(name), output_tokens)


@pytest.fixture
def losses() -> Losses:
    return Losses()


def test_a_choice_that_was_present_at_two_losses_runs_alone_once(losses: Losses) -> None:
    choice = losses.choice(POISON)
    for name in "ab":
        assert not choice.alone
        losses.lose(name, choice)
    assert choice.alone
    replica = losses.replica("c")
    choice.start(replica, b"attempt", 5, alone=True, now=losses.now)
    assert replica.reservation.attempt_id == b"attempt"
    choice.receive(5 + TRIAL_TOKENS - 1, losses.now)
    assert choice.alone
    choice.receive(5 + TRIAL_TOKENS, losses.now)
    assert not choice.alone and not replica.reservation.attempt_id
    choice.end_attempt(5 + TRIAL_TOKENS)
    choice.add(replica, 5 + TRIAL_TOKENS)
    choice.check()
    assert choice.alone and choice.trial_tokens == WHOLE_ANSWER, "it was not lost while the choice ran there alone"
    losses.lose("d", choice)
    with pytest.raises(PoisonousRequestError, match="4 replicas were lost"):
        choice.check()


def test_a_replica_that_is_lost_with_several_choices_counts_once(losses: Losses) -> None:
    choices = losses.choices(POISON, 4)
    losses.lose("a", *choices)
    assert not any(choice.alone for choice in choices)
    losses.lose("b", *choices)
    assert all(choice.alone for choice in choices)
    for choice in choices:
        choice.check()
    losses.lose("c", *choices)
    for choice in [*choices, losses.choice(POISON)]:
        with pytest.raises(PoisonousRequestError):
            choice.check()


def test_processes_that_are_lost_at_once_lead_to_a_trial_not_to_a_refusal(losses: Losses) -> None:
    """A node with several replicas is lost, or the network of this router breaks: the prompt is not the cause."""
    choices = losses.choices(INNOCENT, 4)
    replicas = [losses.replica(name) for name in "abcd"]
    for choice, replica in zip(choices, replicas, strict=True):
        choice.start(replica, b"attempt", 0, alone=False, now=losses.now)
    for choice, replica in zip(choices, replicas, strict=True):
        replica.disconnect()
        choice.end_attempt()
        choice.add(replica, 0)
    for choice in choices:
        choice.check()
        assert choice.alone
    choices[0].start(losses.replica("e"), b"trial", 0, alone=True, now=losses.now)
    choices[0].receive(TRIAL_TOKENS, losses.now)
    assert not any(choice.alone for choice in choices)
    for name in "fgh":
        losses.lose_beside_others(name, choices[1], 50)
        for choice in choices:
            choice.check()
            assert choice.alone, "another process that was lost later leads to another trial"
        whole = losses.replica(f"after {name}")
        assert not choices[2].must_wait(urgent=False)
        choices[2].start(whole, b"short", 0, alone=True, now=losses.now)
        choices[2].receive(49, losses.now)
        assert whole.reservation.attempt_id and choices[3].must_wait(urgent=True)
        choices[2].end_attempt(49, complete=True)
        assert choices[3].alone, "an answer that is shorter than the one at the loss proves nothing"
        choices[3].start(whole, b"long", 0, alone=True, now=losses.now)
        choices[3].receive(50, losses.now)
        assert whole.reservation.attempt_id
        choices[3].end_attempt(50, complete=True)
        assert not any(choice.alone for choice in choices)


def test_a_trial_does_not_keep_others_away_for_long(losses: Losses) -> None:
    """As the replica does. It has not passed, and a loss from then on is beside others."""
    choice, replica = losses.choice(INNOCENT), losses.replica("e")
    for name in "abc":
        losses.lose_beside_others(name, choice, 50)
        choice.start(replica, b"trial", 50, alone=choice.alone, now=losses.now)
        choice.receive(50 + TRIAL_TOKENS, losses.now)
        choice.end_attempt(50 + TRIAL_TOKENS)
    losses.lose_beside_others("d", choice, 50)
    choice.start(replica, b"whole", 50, alone=True, now=losses.now)
    losses.now += TRIAL_SECONDS
    assert replica.reservation.attempt_id == b"whole"
    choice.receive(500, losses.now)
    assert not replica.reservation.attempt_id and choice.alone
    choice.end_attempt(500)
    choice.add(replica, 500)
    choice.check()


@pytest.mark.parametrize("seed", range(50))
@pytest.mark.parametrize("attempts", [1, 4])
@pytest.mark.parametrize("deadly", [1, TRIAL_TOKENS, TRIAL_TOKENS + 1, 60, None])
def test_who_is_refused_against_a_model_of_replicas(
    losses: Losses, deadly: int | None, attempts: int, seed: int
) -> None:
    """Processes are lost at random; a deadly prompt also ends each one that computes this token of an answer to it.

    It ends four processes at most, three if it does so within TRIAL_TOKENS. One that is not deadly is refused only if a
    process was lost while it ran there alone.
    """
    random = Random(seed)
    killed = complete = 0
    lost_alone = refused = False
    for number in range(200):
        losses.now += 0.2
        choice, length, done = losses.choice(POISON), random.choice([10, 40, 100]), 0
        for attempt in range(attempts):
            try:
                choice.check()
            except PoisonousRequestError:
                assert lost_alone
                refused = True
                break
            replica = losses.replica(f"{number}-{attempt}")
            choice.start(replica, b"attempt", done, alone=choice.alone, now=losses.now)
            fault = random.randrange(2 * length) if random.random() < 0.1 else length
            while done < min(length, fault) and done + 1 != deadly:
                done += 1
                choice.receive(done, losses.now)
            isolated = bool(replica.reservation.attempt_id)
            choice.end_attempt(done, complete=done == length)
            if done == length:
                choice.complete()
                complete += 1
                break
            killed += done + 1 == deadly
            lost_alone = lost_alone or isolated
            choice.add(replica, done)
    if deadly is None:
        assert complete > 100 or refused
    else:
        assert refused and killed <= (3 if deadly <= TRIAL_TOKENS else 4)


def test_one_trial_at_a_time(losses: Losses) -> None:
    first, second, neighbour = *losses.choices(POISON, 2), losses.choice(INNOCENT)
    losses.lose("a", first, second, neighbour)
    replica = losses.replica("b")
    assert not second.must_wait(urgent=False)
    first.start(replica, b"1", 0, alone=False, now=losses.now)
    assert second.must_wait(urgent=False) and not second.must_wait(urgent=True)
    assert not neighbour.must_wait(urgent=False), "another fingerprint"
    first.receive(TRIAL_TOKENS, losses.now)
    assert not second.must_wait(urgent=False)
    losses.lose("b", first, second, neighbour)
    first.start(replica, b"2", 0, alone=True, now=losses.now)
    assert second.must_wait(urgent=True) and not neighbour.must_wait(urgent=True) and neighbour.alone
    first.end_attempt()  # refused, or its client disconnected
    assert not second.must_wait(urgent=False) and second.alone


def test_a_trial_beside_others_proves_nothing_after_the_second_loss(losses: Losses) -> None:
    first, second = losses.choices(POISON, 2)
    losses.lose("a", first)
    first.start(losses.replica("b"), b"1", 0, alone=False, now=losses.now)
    losses.lose("c", second)
    first.receive(TRIAL_TOKENS, losses.now)
    assert second.alone


def test_a_complete_answer_ends_the_suspicion_of_its_choice(losses: Losses) -> None:
    """Many clients may send the same prompt; replicas may be lost for other reasons."""
    for name in "abcd":
        choice = losses.choice(INNOCENT)
        losses.lose(name, choice)
        choice.complete()
    losses.choice(INNOCENT).check()
    first, second = losses.choices(INNOCENT, 2)
    for name in "efg":
        losses.lose(name, first, second)
    first.complete()
    with pytest.raises(PoisonousRequestError):
        second.check()


def test_a_process_that_makes_steps_again_was_not_killed(losses: Losses) -> None:
    choice = losses.choice(POISON)
    lost = [losses.lose(name, choice) for name in "abc"]
    with pytest.raises(PoisonousRequestError):
        choice.check()
    lost[0].receive(ReplicaFrame(hello=lost[0].identity, step=1))
    lost[0].receive(ReplicaFrame(step=2))
    choice.check()
    assert choice.alone


def test_losses_are_forgotten(losses: Losses) -> None:
    choice = losses.choice(POISON)
    losses.lose("a", choice)
    losses.now = SUSPECT_SECONDS - 1
    losses.lose("b", choice)
    losses.now += SUSPECT_SECONDS - 1
    assert choice.alone
    losses.now += 1
    assert not choice.alone and not losses.suspects


def test_the_table_is_bounded(losses: Losses) -> None:
    choices = [losses.choice([number]) for number in range(MAX_FINGERPRINTS + 5)]
    for choice in choices:
        for name in "abc":
            losses.lose(name, choice)
    assert len(losses.suspects) == MAX_FINGERPRINTS
    choices[0].check()
    with pytest.raises(PoisonousRequestError):
        choices[-1].check()


def test_the_fingerprint_depends_on_model_tenant_and_prompt() -> None:
    requests = [
        ChoiceRequest("", model, "r", salt, prompt, Sampling())
        for model, salt, prompt in (("m", b"", [1]), ("m", b"", [1, 1]), ("m", b"s", [1]), ("n", b"", [1]))
    ]
    assert len({fingerprint(request) for request in requests}) == len(requests)
