"""Commands and answers of every size between ranks, in order."""

import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore

from headrace_worker.comm.failure_detection import FailureDetector
from headrace_worker.comm.group import Group, host_group
from headrace_worker.core.plan import RowInit, RowSampling, StepPlan, StepResult, TableUpdate, Work
from headrace_worker.ranks.channel import FRAME_BYTES, Channel
from headrace_worker.ranks.messages import Answer, Clear, Command, Draw, Drawn, Step, StopRank, encoder

CAPACITY = FRAME_BYTES - 8


@pytest.fixture
def groups() -> Iterator[list[Group]]:
    """Three ranks in threads of this process."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=10))
    made: list[Group | None] = [None] * 3

    def make(rank: int) -> None:
        made[rank] = host_group(store, "host", "127.0.0.1", rank, 3, FailureDetector(rank))

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    yield [group for group in made if group is not None]


def step_of(size: int) -> Step:
    """A step whose message has exactly that size, by the length of the plan's prompt."""

    def make(tokens: int, big: int) -> Step:
        ids = [1_000_000] * big + [1] * tokens
        return Step(StepPlan(3, [1], [RowInit(0, 1, ids, 5, RowSampling())], [], [Work(0, 0, 5, True)]), [])

    empty = len(encoder.encode(make(0, 0)))
    big = max(0, (size - empty) // 5 - 8)
    small = 0
    while len(encoder.encode(make(small, big))) < size:
        small += 1
    made = make(small, big)
    assert len(encoder.encode(made)) == size
    return made


PLAN = StepPlan(
    9,
    [3, 4],
    [RowInit(1, 7, [5, 6], 2, RowSampling(seed=2**64 - 1, stop_token_ids=(2,), logit_bias=((3, -1.5),), logprobs=3))],
    [TableUpdate(1, 2, 3, [9, 8])],
    [Work(1, 0, 2, True)],
)
COMMANDS: list[Command] = [Step(PLAN, [Drawn(8, [1, 2, 3])]), Clear(17, 3), Draw(9, {0: bytes(8)}), StopRank()]


def test_received_commands_equal_the_sent_ones(groups: list[Group]) -> None:
    first, *others = (Channel(group, 0) for group in groups)
    for command in COMMANDS:
        first.send_command(command)
        assert [other.receive_command() for other in others] == [command, command]


@pytest.mark.parametrize("size", [CAPACITY - 1, CAPACITY, CAPACITY + 1, 2 * CAPACITY, 3_000_000])
def test_messages_below_at_and_above_a_frame(groups: list[Group], size: int) -> None:
    sender, *receivers = (Channel(group, 1) for group in groups)
    large, small = step_of(size), COMMANDS[0]
    threads = []
    for receiver in receivers:

        def take(receiver: Channel = receiver) -> None:
            taken.append([receiver.receive_command() for _ in range(4)])

        threads.append(threading.Thread(target=take))
    taken: list[list[Command]] = []
    for thread in threads:
        thread.start()
    for command in (large, small, large, small):
        sender.send_command(command)
    sender.flush()
    for thread in threads:
        thread.join(30)
    assert taken == [[large, small, large, small]] * 2


def test_commands_and_answers_keep_their_order(groups: list[Group]) -> None:
    """Two batches in flight: commands are sent before the answers of earlier ones are received."""
    first, second, third = (Channel(group, 1) for group in groups)

    def follow(channel: Channel, answers: bool) -> None:
        while isinstance(command := channel.receive_command(), Step):
            if answers:
                channel.send_answer(Answer(StepResult(command.plan.step, [command.plan.step], {}, {})))

    threads = [threading.Thread(target=follow, args=arguments) for arguments in ((second, False), (third, True))]
    for thread in threads:
        thread.start()
    due = []
    for number in range(300):
        first.send_command(Step(StepPlan(number, [], [], [], []), [Drawn(number - 2, [number])]))
        due.append(number)
        if len(due) == 2:
            assert first.receive_answer(2).result.tokens == [due.pop(0)]
    assert first.receive_answer(2).result.step == 299
    first.send_command(StopRank())
    first.flush()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
