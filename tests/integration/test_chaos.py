"""Many requests while replicas are killed: each has one outcome, the correct one."""

import threading
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

from headrace_proto.replica_pb2 import ROLE_DECODE, ROLE_PREFILL

CLIENTS = 8


def prompts(count: int, seed: int) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(10, 300) for _ in range(random.randrange(8, 120))] for _ in range(count)]


def answers(cluster: Any, sent: list[list[int]]) -> list[list[int]]:
    """Sends all prompts from several clients; every one must have an answer."""

    def complete(place: int) -> list[int]:
        answer = cluster.complete(sent[place], max_tokens=12, seed=place, temperature=place % 2)
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert body["usage"]["completion_tokens"] == 12 and body["choices"][0]["finish_reason"] == "length"
        ids: list[int] = body["choices"][0]["token_ids"]
        assert len(ids) == 12
        return ids

    with ThreadPoolExecutor(CLIENTS) as clients:
        return list(clients.map(complete, range(len(sent))))


def pools(cluster: Any) -> None:
    """One prefill replica, two decode replicas."""
    cluster.open(await_ready=False)
    cluster.launch("a", ROLE_DECODE)
    cluster.launch("b", ROLE_DECODE)
    cluster.launch("p", ROLE_PREFILL)
    cluster.publish_and_wait()


def test_random_kills_lose_nothing(process_cluster: Any) -> None:
    """About every second a replica is killed with SIGKILL and replaced, one at a time."""
    cluster = process_cluster
    pools(cluster)
    sent = prompts(400, seed=1)
    undisturbed = answers(cluster, sent[:50])
    over = threading.Event()
    kills = 0

    def kill() -> None:
        nonlocal kills
        random = Random(2)
        while not over.wait(0.4 + random.random()):
            victim = random.choice(["a", "b", "p"])
            cluster.kill(victim)
            cluster.launch(victim, cluster.roles[victim])
            cluster.publish_and_wait()
            kills += 1

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        disturbed = answers(cluster, sent)
    finally:
        over.set()
        killer.join(60)
    assert kills >= 3 and disturbed[: len(undisturbed)] == undisturbed
    cluster.wait_for_idle(5)
