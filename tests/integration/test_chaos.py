"""Many requests while replicas are killed, stand still or lose their clients: each has one outcome, the right one."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest
from crowd import Crowd

from headrace_proto.replica_pb2 import ROLE_DECODE, ROLE_PREFILL

CLIENTS = 8


def prompts(count: int, seed: int) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(10, 300) for _ in range(random.randrange(8, 120))] for _ in range(count)]


def answers(house: Any, asked: list[list[int]], expected: dict[int, list[int]] | None = None) -> list[list[int]]:
    """Asks all from some clients at a time; every one must be answered, and as expected."""

    def ask(place: int) -> list[int]:
        answer = house.complete(asked[place], max_tokens=12, seed=place, temperature=place % 2)
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert body["usage"]["completion_tokens"] == 12 and body["choices"][0]["finish_reason"] == "length"
        ids: list[int] = body["choices"][0]["token_ids"]
        assert len(ids) == 12 and (expected is None or ids == expected[place])
        return ids

    with ThreadPoolExecutor(CLIENTS) as clients:
        return list(clients.map(ask, range(len(asked))))


def pools(house: Any) -> None:
    """One replica for prompts, two for answers."""
    house.open(await_ready=False)
    house.launch("a", ROLE_DECODE)
    house.launch("b", ROLE_DECODE)
    house.launch("p", ROLE_PREFILL)
    house.settle()


@pytest.mark.parametrize("count", [400, pytest.param(2000, marks=pytest.mark.slow)])
def test_random_kills_lose_nothing(count: int, process_house: Any) -> None:
    """Every second or so one of them is killed −9 and replaced, at most one at a time."""
    house = process_house
    pools(house)
    asked = prompts(count, seed=1)
    undisturbed = answers(house, asked[: count // 8])
    over = threading.Event()
    kills = 0

    def kill() -> None:
        nonlocal kills
        random = Random(2)
        while not over.wait(0.4 + random.random()):
            victim = random.choice(["a", "b", "p"])
            house.kill(victim)
            house.launch(victim, house.roles[victim])
            house.settle()
            kills += 1

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        disturbed = answers(house, asked)
    finally:
        over.set()
        killer.join(60)
    assert kills >= 3 and disturbed[: len(undisturbed)] == undisturbed
    house.wait_for_idle(5)


@pytest.mark.parametrize("seconds", [3, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize("victim", ["a", "p"])
def test_a_replica_stands_still_for_a_while(victim: str, seconds: int, process_house: Any) -> None:
    house = process_house
    pools(house)
    asked = prompts(80, seed=3)
    undisturbed = dict(enumerate(answers(house, asked)))
    pid = house.groups[victim].pids[0]
    timers = [threading.Timer(when, os.kill, (pid, number)) for when, number in
              ((0.2, signal.SIGSTOP), (0.2 + seconds, signal.SIGCONT))]  # fmt: skip
    for timer in timers:
        timer.start()
    began = time.monotonic()
    while time.monotonic() - began < seconds + 1:
        answers(house, asked, undisturbed)
    for timer in timers:
        timer.join()
    house.wait_for_idle(5)


class Left:
    """Fifty clients at a time who hang up; whatever their requests held is free within 2 s."""

    COUNT = 50

    def __init__(self, house: Any) -> None:
        self._house = house
        self._blocks = house.free_blocks()
        with house.client() as client:
            self._url = str(client.base_url)

    def crowd(self, length: int, seed: int) -> Crowd:
        random = Random(seed)
        prompts = [[random.randrange(10, 300) for _ in range(length)] for _ in range(self.COUNT)]
        return Crowd(self._url, [{"model": "tiny", "prompt": prompt, "max_tokens": 700} for prompt in prompts])

    def all_leave(self, crowd: Crowd) -> None:
        crowd.leave()
        until = time.monotonic() + 2
        while not self._nothing_left:
            loads = {name: str(self._house.load(name)) for name in self._blocks}
            assert time.monotonic() < until, f"{loads} of {self._blocks}"
            time.sleep(0.02)

    @property
    def _nothing_left(self) -> bool:
        if not self._house.idle or self._house.free_blocks() != self._blocks:
            return False
        return self._house.number("headrace_requests_in_flight") == 0


def test_clients_that_leave_free_everything(process_house: Any) -> None:
    """Fifty each: queued and answered; prompts under way; on a source that says nothing; after a loss; at random."""
    house = process_house
    house.open(await_ready=False, disaggregation="always")
    house.launch("a", ROLE_DECODE, max_num_seqs=12)
    house.launch("p", ROLE_PREFILL)
    house.settle()
    house.eventually(lambda: all(house.free_blocks().values()), 5)
    left = Left(house)

    crowd = left.crowd(20, seed=1)
    house.eventually(lambda: crowd.tokens > 100 and house.load("a").waiting > 0)
    left.all_leave(crowd)

    crowd = left.crowd(900, seed=2)
    house.eventually(lambda: house.load("p").running)
    left.all_leave(crowd)

    house.pause("p")
    crowd = left.crowd(900, seed=3)
    house.eventually(lambda: house.number("headrace_attempts_in_flight") > Left.COUNT // 2)
    crowd.leave()
    house.resume("p")
    left.all_leave(crowd)

    crowd = left.crowd(20, seed=4)
    house.eventually(lambda: crowd.tokens > 100)
    house.kill("a")  # streams wait for another one
    house.eventually(lambda: not house.ready)
    crowd.leave()
    house.launch("a", ROLE_DECODE, max_num_seqs=12)
    house.settle()
    left.all_leave(crowd)

    for seed in range(5, 10):
        crowd = left.crowd(300, seed)
        time.sleep(Random(seed).random() * 0.6)
        left.all_leave(crowd)
    assert len(answers(house, prompts(8, seed=6))) == 8


@pytest.mark.parametrize("seconds", [10, pytest.param(600, marks=pytest.mark.slow)])
def test_a_soak_leaves_no_block_behind(seconds: int, process_house: Any) -> None:
    """Three of ten requests are left before their end; afterwards each pool has what it had."""
    house = process_house
    pools(house)
    house.eventually(lambda: all(house.free_blocks().values()), 5)
    before = house.free_blocks()
    until = time.monotonic() + seconds

    def client(number: int) -> int:
        random = Random(number)
        done = 0
        while time.monotonic() < until:
            prompt = [random.randrange(10, 300) for _ in range(random.randrange(8, 400))]
            patience = random.randrange(0, 30) if random.random() < 0.3 else 1000
            for count, _ in enumerate(house.stream(prompt, max_tokens=random.randrange(2, 60))):
                if count >= patience:
                    break
            done += 1
        return done

    with ThreadPoolExecutor(CLIENTS) as clients:
        assert sum(clients.map(client, range(CLIENTS))) > seconds
    house.wait_for_idle(2.5)
    assert house.free_blocks() == before and house.count("headrace_kv_fetched_bytes_total") > 0
    forecasts = {name: house.load(name).predicted_step_ms for name in before}
    assert max(forecasts.values()) < 1000, forecasts
