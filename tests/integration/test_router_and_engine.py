"""Behaviour of router and engine together that a test of one of them cannot show."""

import threading
from random import Random
from typing import Any

import httpx
import pytest


def _prompts(count: int, length: int = 40, seed: int = 0) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(10, 300) for _ in range(length)] for _ in range(count)]


def _together(calls: list[Any]) -> list[httpx.Response]:
    answers: dict[int, httpx.Response] = {}

    def call(place: int) -> None:
        answers[place] = calls[place]()

    threads = [threading.Thread(target=call, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [answers[place] for place in range(len(calls))]


def _ids(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def test_two_replicas_share_the_work_and_agree(cluster: Any) -> None:
    cluster.add_replica()
    cluster.add_replica()
    cluster.open()
    prompts = _prompts(12)
    alone = [_ids(cluster.complete(prompt, max_tokens=20)) for prompt in prompts]
    answers = _together([lambda p=prompt: cluster.complete(p, max_tokens=20) for prompt in prompts])
    assert [_ids(answer) for answer in answers] == alone
    with cluster.client() as client:
        page = client.get("/metrics").text
    done = [line for line in page.splitlines() if line.startswith("vllm:request_success_total{")]
    assert {place for place in ("tiny-0", "tiny-1") if any(place in line for line in done)} == {"tiny-0", "tiny-1"}


def test_tenants_do_not_share_cached_prompts(cluster: Any) -> None:
    cluster.add_replica()
    cluster.open(auth={"keys": [{"name": "a", "key": "key-of-a-1"}, {"name": "b", "key": "key-of-b-1"}]})
    (prompt,) = _prompts(1, length=64)

    def cached(key: str) -> int:
        usage = cluster.complete(prompt, key, max_tokens=2).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached("key-of-a-1"), cached("key-of-b-1")] == [0, 0]
    assert cached("key-of-a-1") == cached("key-of-b-1") > 0
    assert cluster.complete(prompt, "key-of-c-1").status_code == cluster.complete(prompt).status_code == 401


SAMPLED = {"temperature": 1.0, "seed": 11, "presence_penalty": 0.5, "frequency_penalty": 0.3, "logprobs": 1}


EXCLUDING = {
    "temperature": 1.0,
    "seed": 12,
    "bad_words": ["a", "bc", "!!", "x y"],
    "allowed_token_ids": [*range(20, 60), *range(200, 280)],
}


@pytest.mark.parametrize("options", [{}, SAMPLED, EXCLUDING], ids=["greedy", "seeded", "excluding"])
def test_streams_continue_after_the_end_of_their_replica(cluster: Any, options: dict[str, Any]) -> None:
    """It stops in the middle of sixteen answers: all continue on the other one with the same tokens."""
    cluster.add_replica()
    cluster.add_replica()
    cluster.open()
    prompts = _prompts(16)
    calls = [lambda p=prompt: cluster.complete(p, max_tokens=300, **options) for prompt in prompts]
    expected = [(_ids(answer), answer.json()["usage"]["total_tokens"]) for answer in _together(calls)]
    stopped: list[str] = []

    def stop_one() -> None:
        """As soon as it runs several of them."""
        cluster.eventually(lambda: max(map(len, cluster.running().values())) >= 3)
        running = cluster.running()
        stopped.append(max(running, key=lambda replica: len(running[replica])))
        cluster.replicas[int(stopped[0].removeprefix("tiny-"))].stop()

    stopper = threading.Thread(target=stop_one)
    stopper.start()
    answers = _together(calls)
    stopper.join()
    assert [answer.status_code for answer in answers] == [200] * len(answers)
    found = [(_ids(answer), answer.json()["usage"]["total_tokens"]) for answer in answers]
    assert found == expected
    with cluster.client() as client:
        lines = client.get("/metrics").text.split("\n")
    counters = [line for line in lines if line.startswith(("headrace_migrations_total{", "headrace_retries_total{"))]
    assert sum(float(line.split()[-1]) for line in counters) > 0, "it stopped in the middle of them"
    cluster.eventually(lambda: cluster.ready == sorted({"tiny-0", "tiny-1"} - set(stopped)), 3)
    again = [_ids(cluster.complete(prompt, max_tokens=300, **options)) for prompt in prompts[:4]]
    assert again == [tokens for tokens, _ in expected[:4]], "the remaining replica serves all"


def test_requests_beyond_the_cache_wait_and_complete(cluster: Any) -> None:
    """Sixteen requests with more KV than twice the pool: preempted or queued, each with the tokens of a run alone."""
    cluster.add_replica(kv_cache_memory=1 << 19, max_model_len=256)
    cluster.open()
    prompts = _prompts(16, length=60, seed=4)
    answers = _together([lambda p=prompt: cluster.complete(p, max_tokens=150) for prompt in prompts])
    for prompt, answer in zip(prompts[:4], answers, strict=False):
        assert _ids(answer) == _ids(cluster.complete(prompt, max_tokens=150))
    assert all(len(_ids(answer)) == 150 for answer in answers)
