"""A router knows which replica has the blocks of a prompt, and places requests there."""

import asyncio
from random import Random
from typing import Any

import pytest

from support.integration.in_process_cluster import InProcessCluster

PREFIX, TAIL = 200, 20  # tokens
BLOCK = 16


def prompt(random: Random, length: int) -> list[int]:
    return [random.randrange(10, 300) for _ in range(length)]


def cached(cluster: InProcessCluster, tokens: list[int]) -> int:
    """Sends a prompt; returns how many of its tokens were in the cache of its replica."""
    answer = cluster.complete(tokens, max_tokens=2)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def known_blocks(cluster: InProcessCluster) -> int:
    assert cluster._router is not None
    return cluster._router.services.fleet.index.blocks


@pytest.mark.parametrize("policy", ["predicted", "least-load"])
def test_requests_go_where_their_prefix_is(cluster: InProcessCluster, policy: str) -> None:
    for _ in range(3):
        cluster.add_replica()
    cluster.open(policy=policy)
    random = Random(1)
    prefixes = [prompt(random, PREFIX) for _ in range(6)]
    for prefix in prefixes:
        assert cached(cluster, prefix + prompt(random, TAIL)) == 0
    found = [cached(cluster, prefix + prompt(random, TAIL)) for prefix in prefixes for _ in range(3)]
    expected = PREFIX // BLOCK * BLOCK
    if policy == "predicted":
        assert found == [expected] * len(found)
    else:
        assert found.count(expected) < len(found), "it does not look for prefixes"


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


def test_tenants_share_no_prefix(cluster: InProcessCluster, tmp_path: Any) -> None:
    """A router does not place one tenant's request by what another tenant has cached."""
    keys = tmp_path / "keys"
    keys.write_text("first:a-key-of-the-first-tenant\nsecond:a-key-of-the-second-tenant\n")
    keys.chmod(0o600)
    for _ in range(2):
        cluster.add_replica()
    cluster.open(policy="predicted", auth={"keys_file": str(keys)})
    tokens = prompt(Random(3), PREFIX)
    for key, hit in (("first", False), ("first", True), ("second", False), ("second", True)):
        answer = cluster.complete(tokens, key=f"a-key-of-the-{key}-tenant", max_tokens=2)
        assert answer.status_code == 200, answer.text
        assert bool(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]) == hit
