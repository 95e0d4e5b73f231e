"""The causes of a request's time add up to it, whatever happens to the request."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_proto.replica_pb2 import AttemptTimes
from headrace_router.core.account import MAX_DECISIONS, AccountTable, Cause, TimeAccount
from headrace_router.core.placement import Decision

US = st.integers(0, 10**9)
TIMES = st.none() | st.builds(
    AttemptTimes,
    fetch_us=US,
    compute_us=US,
    own_tokens=st.integers(0, 9999),
    beside_tokens=st.integers(0, 9999),
    decode_us=US,
    prompts_us=US,
    sequences_us=US,
    preempted_us=US,
    prompt_preempted_us=US,
)
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["tokenizer", "placed", "tokens", "left", "answered", "client", "finish"]),
        st.floats(0, 100),
        TIMES,
        st.floats(1, 10),
    ),
    max_size=30,
)


def _apply(account: TimeAccount, event: str, now: float, times: Any, slowness: float) -> None:
    match event:
        case "tokenizer":
            account.enter(Cause.TOKENIZER, now)
        case "placed":
            account.placed(Decision("r0", 1, 10), now)
        case "tokens":
            account.tokens(now, queued=slowness, times=times, slowness=slowness)
        case "left":
            account.left(now)
        case "answered":
            account.answered(now, times=times, slowness=slowness)
        case "client":
            account.enter(Cause.CLIENT, now)
        case _:
            account.finish(now)


@given(EVENTS)
def test_the_causes_add_up(events: list[tuple[str, float, Any, float]]) -> None:
    account, now = TimeAccount("id", 5.0), 5.0
    for event, seconds, times, slowness in events:
        now += seconds
        _apply(account, event, now, times, slowness)
        if account.ended is not None:
            break
    account.finish(now)
    assert sum(account.parts.values()) == pytest.approx(now - 5.0, abs=1e-6)
    assert all(seconds >= 0 for seconds in account.parts.values())
    assert len(account.decisions) <= MAX_DECISIONS


def test_the_time_at_a_replica_is_divided() -> None:
    account = TimeAccount("id", 0.0)
    account.enter(Cause.TOKENIZER, 1.0)
    account.enter(Cause.PLACEMENT, 1.5)
    account.placed(None, 2.0)
    prompt = AttemptTimes(fetch_us=1_000_000, compute_us=4_000_000, own_tokens=300, beside_tokens=100)
    account.tokens(10.0, queued=2.5, times=prompt)
    answer = AttemptTimes(decode_us=9_000_000, prompts_us=2_000_000, sequences_us=1_000_000, preempted_us=3_000_000)
    account.answered(20.0, times=answer, slowness=2.0)
    account.enter(Cause.CLIENT, 20.0)
    account.finish(21.0)
    assert account.parts == pytest.approx(
        {
            Cause.ADMISSION: 1.0,
            Cause.TOKENIZER: 0.5,
            Cause.PLACEMENT: 0.5,
            Cause.FETCH: 1.0,
            Cause.QUEUE: 1.5,
            Cause.PROMPT: 3.0,
            Cause.PROMPT_BESIDE: 1.0,
            Cause.PREEMPTED: 3.0,
            Cause.SLOW_REPLICA: 3.0,  # half of the six seconds of its steps
            Cause.PROMPTS_BESIDE: 1.0,
            Cause.SEQUENCES_BESIDE: 0.5,
            Cause.DECODE: 1.5,
            Cause.REST: 2.5,
            Cause.OTHER_CHOICES: 0.0,
            Cause.CLIENT: 1.0,
        }
    )
    assert account.ranked()[-1][0] is Cause.DECODE and account.first_token == 10.0


def test_a_lost_replica_is_a_cause() -> None:
    account = TimeAccount("id", 0.0)
    account.enter(Cause.PLACEMENT, 0.0)
    account.placed(None, 0.0)
    account.left(2.0)  # refused before its first token
    account.placed(None, 3.0)
    account.tokens(4.0, queued=0.5)
    account.left(6.0)
    account.placed(None, 7.0)
    account.tokens(9.0)
    account.answered(10.0)
    account.finish(10.0)
    parts = {cause: seconds for cause, seconds in account.parts.items() if seconds}
    assert parts == pytest.approx({Cause.MOVED: 6.0, Cause.QUEUE: 0.5, Cause.REST: 0.5, Cause.DECODE: 3.0})


def test_a_running_request_counts_until_now() -> None:
    account, tokens = TimeAccount("r", 10.0), 0
    account.begin(8, lambda: (tokens, 3), 11.0)
    account.placed(None, 12.0)
    document = account.document(15.0)
    assert document["running"] and document["seconds"] == 5.0
    assert {each["cause"]: each["seconds"] for each in document["causes"]} == {
        "queue": 3.0,
        "admission": 1.0,
        "placement": 1.0,
    }
    tokens = 7
    account.tokens(16.0)
    document = account.document(20.0)
    assert document["output_tokens"] == 7 and document["cached_tokens"] == 3 and document["seconds"] == 10.0
    assert {each["cause"]: each["seconds"] for each in document["causes"]}["decode"] == 4.0
    assert sum(each["seconds"] for each in document["causes"]) == pytest.approx(10.0)
    account.finish(21.0, disconnected=True)
    again = account.document(99.0)
    assert (again["seconds"], again["running"], again["failed"], again["disconnected"]) == (11.0, False, False, True)
    assert again["output_tokens"] == 7 and again["prompt_tokens"] == 8


def test_the_table_keeps_the_newest() -> None:
    table = AccountTable(kept=3)
    accounts = [table.open(f"r{number}", f"a{number}", float(number)) for number in range(5)]
    assert len(table) == 3 and table.get("r1") is None and table.get("a1") is None
    assert table.get("r4") is table.get("a4") is table.get("chatcmpl-a4") is accounts[4]
    again = table.open("r3", "a5", 5.0)
    assert table.get("r3") is again and table.get("a3") is accounts[3]
    for number in range(6, 9):
        table.open(f"r{number}", f"a{number}", float(number))
    assert table.get("r3") is None and len(table._by_id) == 6
