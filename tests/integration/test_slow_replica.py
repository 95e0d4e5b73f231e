"""One replica of four becomes five times slower, and fast again."""

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from headrace_router.core.attempt import Attempt
from headrace_router.core.replica_state import ReplicaState
from support.integration.arrivals import Arrivals
from support.integration.throttle import Throttle

RATE = 16.0  # requests per second
TOKENS = 24


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[float, str]]]:
    """(time, replica) of each attempt."""
    found: list[tuple[float, str]] = []
    submit = ReplicaState.submit

    def record(self: ReplicaState[Any], *given: Any, **options: Any) -> Attempt:
        found.append((time.monotonic(), self.replica_id))
        return submit(self, *given, **options)

    monkeypatch.setattr(ReplicaState, "submit", record)
    yield found


def _shares(placed: list[tuple[float, str]], begin: float, end: float) -> Counter[str]:
    return Counter(replica for at, replica in placed if begin <= at < end)


def test_a_slow_replica_gets_few_requests_until_it_is_fast_again(
    process_cluster: Any, placed: list[tuple[float, str]]
) -> None:
    cluster = process_cluster
    cluster.open(await_ready=False)
    for name in "abcd":
        cluster.launch(name)
    cluster.publish_and_wait()
    with cluster.client() as client:
        arrivals = Arrivals(str(client.base_url), RATE, TOKENS)
    time.sleep(10)
    throttle = Throttle(cluster.groups["a"].pids[0], share=0.2)
    slow_since = time.monotonic()
    try:
        time.sleep(25)
    finally:
        throttle.close()
    fast_since = time.monotonic()
    time.sleep(20)
    end = time.monotonic()
    answers = arrivals.stop()
    assert [answer for answer in answers if answer.status != 200] == []
    before = _shares(placed, 0, slow_since)
    slow = _shares(placed, slow_since + 10, fast_since)
    after = _shares(placed, fast_since + 10, end)
    print(f"requests per replica: before {before}, slow {slow}, after {after}")
    assert before["a"] >= 0.15 * before.total(), before
    assert slow.total() > 100 and slow["a"] <= 0.05 * slow.total(), slow
    assert after["a"] >= 0.15 * after.total(), after
