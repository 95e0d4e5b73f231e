"""Log-probabilities of prompts over ranks and in pools: those of one replica."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from headrace_proto.replica_pb2 import ROLE_DECODE, ROLE_PREFILL
from support.integration.in_process_cluster import InProcessCluster

LENGTHS = (1, 17, 300, 700)


def _choices(cluster: Any, length: int, **options: Any) -> list[Any]:
    prompt = [3 + (length * 31 + place * 7) % 250 for place in range(length)]
    answer = cluster.complete(prompt, **{"max_tokens": 8, "echo": True, "logprobs": 1} | options)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    return [
        (choice["text"], [logprob and round(logprob, 3) for logprob in choice["logprobs"]["token_logprobs"]])
        for choice in answer.json()["choices"]
    ]


@pytest.fixture(scope="module")
def expected(tiny_folder: Any) -> list[Any]:
    cluster = InProcessCluster(tiny_folder)
    try:
        cluster.add_replica()
        cluster.open()
        return [_choices(cluster, length) for length in LENGTHS]
    finally:
        cluster.close()


def _same(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        for (text, logprobs), (other_text, others) in zip(one, other, strict=True):
            assert text == other_text and logprobs[0] is others[0] is None
            assert logprobs[1:] == pytest.approx(others[1:], abs=2e-3)


def test_over_ranks(process_cluster: Any, expected: list[Any]) -> None:
    process_cluster.open(await_ready=False)
    process_cluster.launch("a", tp=2, pp=2)
    process_cluster.publish_and_wait()
    with ThreadPoolExecutor(len(LENGTHS)) as threads:
        _same(list(threads.map(lambda length: _choices(process_cluster, length), LENGTHS)), expected)


def test_in_pools_the_answering_replica_computes_the_prompt(process_cluster: Any, expected: list[Any]) -> None:
    process_cluster.open(await_ready=False, disaggregation="always")
    process_cluster.launch("a", ROLE_PREFILL)
    process_cluster.launch("b", ROLE_DECODE)
    process_cluster.publish_and_wait()
    for _ in range(2):
        _same([_choices(process_cluster, length) for length in LENGTHS], expected)
    assert process_cluster.count("headrace_kv_fetches_total") == 0
    assert [len(_choices(process_cluster, 300, n=2))] == [2]
