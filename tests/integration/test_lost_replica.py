"""One of four replicas is lost at 90 % load. Each has its own fixed speed, as replicas on GPUs of their own do."""

import time
from typing import Any

from support.integration.arrivals import Answer, Arrivals
from support.integration.throttle import Throttle

TOKENS = 32
ROWS = 4  # of a replica
SHARE = 0.07  # of a processor for each replica
WARM_SECONDS, MEASURED_SECONDS = 5, 20


def _tokens_per_second(answers: list[Answer], begin: float, end: float) -> float:
    return sum(answer.tokens for answer in answers if begin <= answer.ended < end) / (end - begin)


def _capacity(url: str, rate: float) -> float:
    """Tokens per second of answers while more arrives than can be answered."""
    begin = time.monotonic() + WARM_SECONDS
    arrivals = Arrivals(url, rate, TOKENS)
    time.sleep(WARM_SECONDS + MEASURED_SECONDS)
    return _tokens_per_second(arrivals.stop(120), begin, begin + MEASURED_SECONDS)


def test_three_carry_on_at_their_speed(process_cluster: Any) -> None:
    cluster = process_cluster
    cluster.open(await_ready=False, limits={"queue_seconds": 5.0, "max_concurrent_requests": 4 * 2 * ROWS})
    for name in "abcd":
        cluster.launch(name, max_num_seqs=ROWS)
    cluster.publish_and_wait()
    throttles = {name: Throttle(group.pids[0], SHARE) for name, group in cluster.groups.items()}
    try:
        with cluster.client() as client:
            url = str(client.base_url)
        four = _capacity(url, 60)
        arrivals = Arrivals(url, 0.9 * four / TOKENS, TOKENS)
        time.sleep(WARM_SECONDS)
        throttles.pop("d").close()
        lost_at = time.monotonic()
        running = sum(len(link.attempts) for link in cluster._router.services.fleet.replicas if link.replica_id == "d")
        cluster.kill("d")
        time.sleep(5)
        moved = cluster.count("headrace_migrations_total")
        time.sleep(30)
        moved_later = cluster.count("headrace_migrations_total") - moved
        rebalanced = cluster.count("headrace_rebalancings_total")
        answers = arrivals.stop(120)
        three = _capacity(url, 60)
    finally:
        for throttle in throttles.values():
            throttle.close()
    goodput = _tokens_per_second(answers, lost_at + 10, lost_at + 35)
    statuses = sorted({answer.status for answer in answers})
    print(
        f"four {four:.0f} tok/s, three {three:.0f}; 10 to 35 s after the loss {goodput:.0f} ({goodput / three:.2f}); "
        f"running there {running}, moved {moved} in 5 s, {moved_later} later, rebalanced {rebalanced}; {statuses}"
    )
    assert set(statuses) <= {200, 503}
    assert goodput >= 0.95 * three
    assert moved <= running and moved_later == 0
