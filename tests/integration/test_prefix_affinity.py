"""A router knows which replica has the blocks of a prompt, and places requests there."""

import asyncio
from random import Random

from headrace_router.core.placement import Decision
from support.integration.in_process_cluster import InProcessCluster

PREFIX, TAIL = 800, 20  # tokens
BLOCK = 16


def prompt(random: Random, length: int) -> list[int]:
    return [random.randrange(10, 300) for _ in range(length)]


def placed(cluster: InProcessCluster, tokens: list[int]) -> tuple[int, Decision]:
    """Sends a prompt; returns how many of its tokens were in the cache of its replica, and why that was chosen."""
    answer = cluster.complete(tokens, max_tokens=2)
    assert answer.status_code == 200, answer.text
    assert cluster._router is not None
    account = cluster._router.services.accounts.get(answer.headers["x-request-id"])
    assert account is not None
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]), account.decisions[-1]


def cached(cluster: InProcessCluster, tokens: list[int]) -> int:
    """Sends a prompt; returns how many of its tokens were in the cache of its replica."""
    return placed(cluster, tokens)[0]


def known_blocks(cluster: InProcessCluster) -> int:
    assert cluster._router is not None
    return cluster._router.services.fleet.index.blocks


def test_requests_go_where_their_prefix_is(cluster: InProcessCluster) -> None:
    """Unless another replica is faster in spite of it: a decision knows who has the prefix, and follows its costs."""
    for _ in range(3):
        cluster.add_replica()
    cluster.open(policy="predicted")
    random = Random(1)
    prefixes = [prompt(random, PREFIX) for _ in range(6)]
    expected = PREFIX // BLOCK * BLOCK
    holders = []
    for prefix in prefixes:
        found, made = placed(cluster, prefix + prompt(random, TAIL))
        assert found == 0
        holders.append({made.replica_id})
    there = 0
    for prefix, replicas in zip(prefixes * 3, holders * 3, strict=True):
        found, made = placed(cluster, prefix + prompt(random, TAIL))
        known = {each.replica_id: each for each in made.considered}
        assert {name for name, each in known.items() if each.cached_tokens == expected} == replicas
        assert found == known[made.replica_id].cached_tokens
        if made.replica_id not in replicas:
            assert known[made.replica_id].cost < min(known[name].cost for name in replicas)
        there += made.replica_id in replicas
        replicas.add(made.replica_id)
    assert there >= 15, "of 18: a pause of the machine may make one replica look slow for a moment"


def test_a_router_that_starts_later_knows_what_is_cached(cluster: InProcessCluster) -> None:
    for _ in range(3):
        cluster.add_replica()
    cluster.open(policy="predicted")
    random = Random(2)
    prefixes = [prompt(random, PREFIX) for _ in range(6)]
    for prefix in prefixes:
        cached(cluster, prefix)
    assert cluster._router is not None
    asyncio.run_coroutine_threadsafe(cluster._router.stop(), cluster._loop).result(20)
    cluster.open(policy="predicted")
    cluster.eventually(lambda: known_blocks(cluster) >= len(prefixes) * (PREFIX // BLOCK))
    found = [cached(cluster, prefix + prompt(random, TAIL)) for prefix in prefixes]
    assert found == [PREFIX // BLOCK * BLOCK] * len(prefixes)
