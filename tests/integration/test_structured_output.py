"""Constrained answers of random weights: with other requests, in pools, and after a kill."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from headrace_proto.replica_pb2 import ROLE_DECODE, ROLE_PREFILL

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "maxItems": 4},
        "kind": {"enum": ["a", "b", None]},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
}
GUIDED: dict[str, Any] = {"structured_outputs": {"json": SCHEMA}, "temperature": 1, "ignore_eos": False}
LONG = GUIDED | {"structured_outputs": {"regex": "[a-z]{200}"}}


def _prompt(seed: int) -> list[int]:
    return [3 + (seed * 31 + place * 7) % 250 for place in range(200)]


def _bodies(count: int) -> list[dict[str, Any]]:
    """Guided and free requests in turn."""
    return [{"seed": seed, "max_tokens": 120, **(GUIDED if seed % 2 else {"temperature": 1})} for seed in range(count)]


def _answer(cluster: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = cluster.complete(_prompt(body["seed"]), **body)
    assert answer.status_code == 200, answer.text
    choices: list[dict[str, Any]] = answer.json()["choices"]
    if "structured_outputs" in body:
        for choice in choices:
            assert choice["finish_reason"] == "stop"
            Draft202012Validator(SCHEMA).validate(json.loads(choice["text"]))
    return [{"text": choice["text"], "token_ids": choice["token_ids"]} for choice in choices]


@pytest.fixture(scope="module")
def expected(tiny_folder: Any) -> list[Any]:
    """One after the other, by one replica."""
    from support.integration.in_process_cluster import InProcessCluster

    cluster = InProcessCluster(tiny_folder)
    try:
        cluster.add_replica()
        cluster.open()
        return [_answer(cluster, body) for body in _bodies(12)]
    finally:
        cluster.close()


def test_beside_free_requests(cluster: Any, expected: list[Any]) -> None:
    for _ in range(2):
        cluster.add_replica()
    cluster.open()
    with ThreadPoolExecutor(12) as threads:
        assert list(threads.map(lambda body: _answer(cluster, body), _bodies(12))) == expected


def test_in_pools(process_cluster: Any, expected: list[Any]) -> None:
    process_cluster.open(await_ready=False, disaggregation="always")
    process_cluster.launch("a", ROLE_PREFILL)
    process_cluster.launch("b", ROLE_DECODE)
    process_cluster.publish_and_wait()
    with ThreadPoolExecutor(12) as threads:
        assert list(threads.map(lambda body: _answer(process_cluster, body), _bodies(12))) == expected
    assert process_cluster.count("headrace_kv_fetches_total") > 0


def test_the_replica_is_killed_in_the_middle(process_cluster: Any) -> None:
    process_cluster.open(await_ready=False)
    for name in "ab":
        process_cluster.launch(name)
    process_cluster.publish_and_wait()
    whole = [
        token
        for choice in process_cluster.stream(_prompt(1), seed=1, max_tokens=250, **LONG)
        for token in choice["token_ids"]
    ]
    tokens: list[int] = []
    for choice in process_cluster.stream(_prompt(1), seed=1, max_tokens=250, **LONG):
        tokens += choice["token_ids"]
        if len(tokens) >= 50 and process_cluster.count("headrace_migrations_total") == 0 and len(tokens) < 60:
            process_cluster.kill(process_cluster.owner())
    assert tokens == whole and process_cluster.count("headrace_migrations_total") == 1
