"""Many requests while replicas are killed or paused, or clients disconnect: each has one outcome, the correct one."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest

from headrace_proto.replica_pb2 import ROLE_DECODE, ROLE_PREFILL
from support.integration.load_generator import LoadGenerator

CLIENTS = 8


def prompts(count: int, seed: int) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(10, 300) for _ in range(random.randrange(8, 120))] for _ in range(count)]


def answers(cluster: Any, sent: list[list[int]], expected: dict[int, list[int]] | None = None) -> list[list[int]]:
    """Sends all prompts from several clients; every one must have an answer, the expected one if given."""

    def complete(place: int) -> list[int]:
        answer = cluster.complete(sent[place], max_tokens=12, seed=place, temperature=place % 2)
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert body["usage"]["completion_tokens"] == 12 and body["choices"][0]["finish_reason"] == "length"
        ids: list[int] = body["choices"][0]["token_ids"]
        assert len(ids) == 12 and (expected is None or ids == expected[place])
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


@pytest.mark.parametrize("count", [400])
def test_random_kills_lose_nothing(count: int, process_cluster: Any) -> None:
    """About every second a replica is killed with SIGKILL and replaced, one at a time."""
    cluster = process_cluster
    pools(cluster)
    sent = prompts(count, seed=1)
    undisturbed = answers(cluster, sent[: count // 8])
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


@pytest.mark.parametrize("seconds", [3])
@pytest.mark.parametrize("victim", ["a", "p"])
def test_a_paused_replica_continues(victim: str, seconds: int, process_cluster: Any) -> None:
    cluster = process_cluster
    pools(cluster)
    sent = prompts(80, seed=3)
    undisturbed = dict(enumerate(answers(cluster, sent)))
    pid = cluster.groups[victim].pids[0]
    timers = [threading.Timer(when, os.kill, (pid, number)) for when, number in
              ((0.2, signal.SIGSTOP), (0.2 + seconds, signal.SIGCONT))]  # fmt: skip
    for timer in timers:
        timer.start()
    began = time.monotonic()
    while time.monotonic() - began < seconds + 1:
        answers(cluster, sent, undisturbed)
    for timer in timers:
        timer.join()
    cluster.wait_for_idle(5)


class DisconnectCheck:
    """Fifty clients that disconnect at once; all blocks of their requests are free within 2 s."""

    COUNT = 50

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._blocks = cluster.free_blocks()
        with cluster.client() as client:
            self._url = str(client.base_url)

    def start(self, length: int, seed: int) -> LoadGenerator:
        random = Random(seed)
        prompts = [[random.randrange(10, 300) for _ in range(length)] for _ in range(self.COUNT)]
        return LoadGenerator(self._url, [{"model": "tiny", "prompt": prompt, "max_tokens": 700} for prompt in prompts])

    def disconnect_all(self, clients: LoadGenerator) -> None:
        clients.disconnect()
        until = time.monotonic() + 2
        while not self._is_clean:
            loads = {name: str(self._cluster.load(name)) for name in self._blocks}
            assert time.monotonic() < until, f"{loads} of {self._blocks}"
            time.sleep(0.02)

    @property
    def _is_clean(self) -> bool:
        if not self._cluster.idle or self._cluster.free_blocks() != self._blocks:
            return False
        return self._cluster.number("headrace_requests_in_flight") == 0


def test_clients_that_disconnect_free_everything(process_cluster: Any) -> None:
    """Fifty each: queued and decoding; during prefill; with a paused prefill replica; after a kill; at random times."""
    cluster = process_cluster
    cluster.open(await_ready=False, disaggregation="always")
    cluster.launch("a", ROLE_DECODE, max_num_seqs=12)
    cluster.launch("p", ROLE_PREFILL)
    cluster.publish_and_wait()
    cluster.eventually(lambda: all(cluster.free_blocks().values()), 5)
    check = DisconnectCheck(cluster)

    clients = check.start(20, seed=1)
    cluster.eventually(lambda: clients.tokens > 100 and cluster.load("a").waiting > 0)
    check.disconnect_all(clients)

    clients = check.start(900, seed=2)
    cluster.eventually(lambda: cluster.load("p").running)
    check.disconnect_all(clients)

    cluster.pause("p")
    clients = check.start(900, seed=3)
    cluster.eventually(lambda: cluster.number("headrace_attempts_in_flight") > DisconnectCheck.COUNT // 2)
    clients.disconnect()
    cluster.resume("p")
    check.disconnect_all(clients)

    clients = check.start(20, seed=4)
    cluster.eventually(lambda: clients.tokens > 100)
    cluster.kill("a")  # streams wait for another one
    cluster.eventually(lambda: not cluster.ready)
    clients.disconnect()
    cluster.launch("a", ROLE_DECODE, max_num_seqs=12)
    cluster.publish_and_wait()
    check.disconnect_all(clients)

    for seed in range(5, 10):
        clients = check.start(300, seed)
        time.sleep(Random(seed).random() * 0.6)
        check.disconnect_all(clients)
    assert len(answers(cluster, prompts(8, seed=6))) == 8


@pytest.mark.parametrize("seconds", [10])
def test_a_soak_frees_every_block(seconds: int, process_cluster: Any) -> None:
    """Three of ten clients disconnect early; afterwards each replica has the free blocks of the start."""
    cluster = process_cluster
    pools(cluster)
    cluster.eventually(lambda: all(cluster.free_blocks().values()), 5)
    before = cluster.free_blocks()
    until = time.monotonic() + seconds

    def client(number: int) -> int:
        random = Random(number)
        done = 0
        while time.monotonic() < until:
            prompt = [random.randrange(10, 300) for _ in range(random.randrange(8, 400))]
            disconnect_at = random.randrange(0, 30) if random.random() < 0.3 else 1000
            for count, _ in enumerate(cluster.stream(prompt, max_tokens=random.randrange(2, 60))):
                if count >= disconnect_at:
                    break
            done += 1
        return done

    with ThreadPoolExecutor(CLIENTS) as clients:
        assert sum(clients.map(client, range(CLIENTS))) > seconds
    cluster.wait_for_idle(2.5)
    assert cluster.free_blocks() == before and cluster.count("headrace_kv_fetched_bytes_total") > 0
    forecasts = {name: cluster.load(name).predicted_step_ms for name in before}
    assert max(forecasts.values()) < 1000, forecasts
