"""Pools, role changes and drains under load: no stream fails, all tokens are equal."""

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import httpx
import pytest

from support.e2e.headrace_process import SMALL, Serve
from support.e2e.metrics_page import Metrics
from support.e2e.plain_model import same_but_for_ties
from support.e2e.streams import Outcome, run_streams, steady_streams

LEAN = (*SMALL, "--kv-cache-memory", "128MiB", "--cpu-threads", "1")
COUNT = 8
TOKENS = 160


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """smollm2-0 and smollm2-1 decode, smollm2-2 computes prompts. The tests depend on their order."""
    pools = ("--prefill", "1", "--decode", "2", "--disaggregation", "auto")  # prefill replicas do not answer
    serve = Serve(tmp_path_factory.mktemp("roles") / "home", *LEAN, *pools)
    try:
        yield serve.await_ready()
    finally:
        serve.close()


@pytest.fixture(scope="module")
def bodies() -> list[dict[str, Any]]:
    """Greedy, half of them with prompts that are long enough for a prefill replica."""
    random = Random(3)
    lengths = [12, 200] * (COUNT // 2)
    return [
        {
            "model": "smollm2",
            "prompt": [random.randrange(20, 40_000) for _ in range(length)],
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }
        for length in lengths
    ]


@pytest.fixture(scope="module")
def undisturbed(pools: Serve, bodies: list[dict[str, Any]]) -> list[Outcome]:
    return run_streams(pools.url, bodies)


def _status(serve: Serve) -> dict[str, dict[str, Any]]:
    return {entry["id"]: entry for entry in serve.status()["replicas"]}


def _headrace(serve: Serve, *arguments: str) -> Any:
    return serve.run(*arguments, "--admin-port", str(serve.admin_port))


def _generated(serve: Serve, replica: str) -> float:
    return Metrics(serve.url).value("vllm:generation_tokens_total", replica=replica)


@contextmanager
def _under_load(
    serve: Serve, bodies: list[dict[str, Any]], on: str, eventually: Callable[..., None]
) -> Iterator[list[tuple[int, Outcome]]]:
    """Streams run during the block, and `on` has decoded for some; the outcomes are complete after the block."""
    before = _generated(serve, on)
    with steady_streams(serve.url, bodies) as outcomes:
        eventually(lambda: _generated(serve, on) > before + 8, 30, f"that {on} answers")
        yield outcomes


def _same(outcomes: list[tuple[int, Outcome]], expected: list[Outcome], bodies: list[dict[str, Any]]) -> None:
    """Every stream is complete, with the undisturbed tokens except for ties (docs/design.md)."""
    bad = [outcome for _, outcome in outcomes if not outcome.complete]
    assert len(outcomes) >= len(bodies) and not bad, bad[:3]
    same_but_for_ties(
        [bodies[index] for index, _ in outcomes],
        [outcome.token_ids for _, outcome in outcomes],
        [expected[index].token_ids[: len(outcome.token_ids)] for index, outcome in outcomes],
    )


def _few(serve: Serve, bodies: list[dict[str, Any]]) -> list[tuple[int, Outcome]]:
    """All of them once, four tokens each."""
    return list(enumerate(run_streams(serve.url, [body | {"max_tokens": 4} for body in bodies])))


def test_each_replica_has_its_role(pools: Serve, undisturbed: list[Outcome]) -> None:
    assert [(entry["role"], entry["tp"], entry["pp"], entry["state"]) for entry in _status(pools).values()] == [
        ("decode", 1, 1, "ready"),
        ("decode", 1, 1, "ready"),
        ("prefill", 1, 1, "ready"),
    ]
    table = _headrace(pools, "status").stdout
    assert "prefill" in table and "tp×pp" in table
    assert "smollm2-2  prefill, cpu" in pools.stderr_text and "smollm2-0  decode, cpu" in pools.stderr_text
    print(next(line for line in pools.stderr_text.splitlines() if "is ready after" in line))
    assert all(outcome.complete for outcome in undisturbed)
    generated = [_generated(pools, f"smollm2-{index}") for index in range(3)]
    assert generated[0] and generated[1] and generated[2] == 0, "only decode replicas generate"


def test_a_role_changes_under_load(
    pools: Serve, undisturbed: list[Outcome], bodies: list[dict[str, Any]], eventually: Callable[..., None]
) -> None:
    with _under_load(pools, bodies, "smollm2-0", eventually) as outcomes:
        flipped = json.loads(_headrace(pools, "role", "smollm2-0", "prefill", "--json").stdout)
        pool = json.loads(_headrace(pools, "role", "smollm2-2", "both", "--json").stdout)
    print(f"role changes under {COUNT} streams: {flipped['seconds']:.3f} s, {pool['seconds']:.3f} s")
    assert max(flipped["seconds"], pool["seconds"]) <= 1.0
    assert (flipped["before"], flipped["role"]) == ("decode", "prefill")
    assert (pool["before"], pool["role"]) == ("prefill", "both")
    _same(outcomes, undisturbed, bodies)
    prefilling = _generated(pools, "smollm2-0")
    both = _generated(pools, "smollm2-2")
    _same(_few(pools, bodies), undisturbed, bodies)
    assert _generated(pools, "smollm2-0") == prefilling, "no new request is placed there"
    assert _generated(pools, "smollm2-2") > both
    status = _status(pools)
    assert [(entry["role"], entry["generation"]) for entry in status.values()] == [
        ("prefill", 1),
        ("decode", 1),
        ("both", 1),
    ]


def test_a_drain_under_load_moves_unfinished_streams(
    pools: Serve, undisturbed: list[Outcome], bodies: list[dict[str, Any]], eventually: Callable[..., None]
) -> None:
    (pid,) = (rank["pid"] for rank in _status(pools)["smollm2-1"]["ranks"])
    with _under_load(pools, bodies, "smollm2-1", eventually) as outcomes:
        done = _headrace(pools, "drain", "smollm2-1", "--seconds", "0")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr.splitlines()[-2] == "headrace: smollm2-1 is drained"
    _same(outcomes, undisturbed, bodies)
    assert Metrics(pools.url)["headrace_migrations_total"] >= 1
    drained = _status(pools)["smollm2-1"]
    assert (drained["state"], drained["ranks"], drained["generation"]) == ("drained", [], 1)
    assert not os.path.exists(f"/proc/{pid}"), "its memory is free"
    assert httpx.get(f"{pools.url}/health/ready", trust_env=False).status_code == 200
    _same(_few(pools, bodies), undisturbed, bodies)


def test_a_drained_replica_is_rebuilt(
    pools: Serve, undisturbed: list[Outcome], bodies: list[dict[str, Any]], eventually: Callable[..., None]
) -> None:
    done = _headrace(pools, "undrain", "smollm2-1", "--json")
    assert done.returncode == 0, done.stderr
    entry = json.loads(done.stdout)
    assert (entry["id"], entry["state"], entry["generation"], entry["role"]) == ("smollm2-1", "ready", 2, "decode")
    assert json.loads(_headrace(pools, "role", "smollm2-2", "prefill", "--json").stdout)["role"] == "prefill"
    _same(_few(pools, bodies), undisturbed, bodies)
    eventually(lambda: "smollm2-1: ready again" in pools.stderr_text, 5)
    events = [
        line
        for line in pools.stderr_text.partition("Talk to it")[2].splitlines()
        if " serve " in line and "smollm2-1" in line
    ]
    shown = [re.sub(r"^\S+ serve +(warning: )?(smollm2-1: )?", "", line).partition(";")[0] for line in events]
    assert [words for words in shown if words != "draining"] == ["drained", "ready again"]


def test_a_rollout_under_load_fails_no_stream(
    pools: Serve, undisturbed: list[Outcome], bodies: list[dict[str, Any]], eventually: Callable[..., None]
) -> None:
    """The prefill replica, then one that decodes: each is built again while streams run."""
    before = {name: entry["generation"] for name, entry in _status(pools).items()}
    with _under_load(pools, bodies, "smollm2-1", eventually) as outcomes:
        assert _headrace(pools, "role", "smollm2-0", "both").returncode == 0
        port = ("--admin-port", str(pools.admin_port))
        done = pools.run("rollout", "smollm2-1", "smollm2-2", "--seconds", "0", *port, seconds=240)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "headrace: 2 of 2 rolled"
    after = {name: entry["generation"] for name, entry in _status(pools).items()}
    assert [after[name] - before[name] for name in before] == [0, 1, 1]
    _same(outcomes, undisturbed, bodies)
