"""A replica of several ranks: equal tokens, half the weights each; after the death of any rank it is rebuilt."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import psutil
import pytest

from support.e2e.headrace_process import SMALL, Serve
from support.e2e.metrics_page import Metrics
from support.e2e.plain_model import PlainModel, same_but_for_ties
from support.e2e.sampling_options import SAMPLING_OPTIONS
from support.e2e.streams import Outcome, run_streams

GREEDY, SAMPLED, OUTPUT = 12, 20, 12
END_SECONDS = 2.0

SPLITS = [("--tp", "2"), ("--pp", "2"), ("--tp", "2", "--pp", "2")]


@pytest.fixture(scope="module", params=SPLITS, ids=" ".join)
def split(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    serve = Serve(tmp_path_factory.mktemp("ranks") / "home", *SMALL, *request.param)
    try:
        yield serve.await_ready()
    finally:
        serve.close()


@pytest.fixture(scope="module")
def plain() -> Iterator[PlainModel]:
    yield PlainModel()


def _status(serve: Serve) -> dict[str, Any]:
    found: dict[str, Any] = serve.status()["replicas"][0]
    return found


def _running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _body(prompt: list[int], **options: Any) -> dict[str, Any]:
    return {"model": "smollm2", "prompt": prompt, "max_tokens": OUTPUT, "ignore_eos": True, **options}


def test_32_streams_equal_plain_transformers(split: Serve, server: Serve, plain: PlainModel) -> None:
    random = Random(5)
    prompts = [[random.randrange(20, 40_000) for _ in range(random.randrange(1, 60))] for _ in range(32)]
    greedy = [_body(prompt, temperature=0, logprobs=1) for prompt in prompts[:GREEDY]]
    sampled = [
        _body(prompt, seed=place, **SAMPLING_OPTIONS[place % len(SAMPLING_OPTIONS)])
        for place, prompt in enumerate(prompts[GREEDY:])
    ]
    outcomes = run_streams(split.url, greedy + sampled)
    ties = 0
    for body, outcome in zip(greedy, outcomes[:GREEDY], strict=True):
        assert outcome.complete and len(outcome.token_ids) == OUTPUT, outcome
        ties += plain.ties(body["prompt"], outcome.token_ids, outcome.logprobs)
    assert ties <= 2
    # Sampled tokens equal those of one rank; sums in another order may change a tie of two perturbed scores.
    single = run_streams(server.url, sampled)
    assert all(outcome.complete for outcome in [*single, *outcomes[GREEDY:]])
    differ = sum(one.token_ids != many.token_ids for one, many in zip(single, outcomes[GREEDY:], strict=True))
    assert differ <= 2


def test_every_rank_may_be_killed(split: Serve, eventually: Callable[..., None]) -> None:
    before = _status(split)
    victim = before["ranks"][-1] if before["generation"] % 2 else before["ranks"][0]
    pids = [rank["pid"] for rank in before["ranks"]]
    assert len(set(pids)) == len(pids) > 1
    bodies = [_body([100, 200, 300 + place], temperature=0, max_tokens=120) for place in range(4)]
    expected = run_streams(split.url, bodies)
    found: list[Outcome] = []
    streams = threading.Thread(target=lambda: found.extend(run_streams(split.url, bodies)))
    streams.start()
    eventually(lambda: Metrics(split.url)["vllm:num_requests_running"] == len(bodies), 20, "the streams run")
    time.sleep(0.5)
    killed = time.monotonic()
    os.kill(victim["pid"], signal.SIGKILL)
    eventually(lambda: not any(map(_running, pids)), END_SECONDS, "all ranks of the group have ended")
    eventually(
        lambda: f"rank {victim['rank']} of {before['id']} (process {victim['pid']})" in split.stderr_text, 3, "its name"
    )
    eventually(lambda: _status(split)["state"] == "ready", 90, "the group is rebuilt")
    after = _status(split)
    assert after["generation"] == before["generation"] + 1
    assert not set(pids) & {rank["pid"] for rank in after["ranks"]}
    assert time.monotonic() - killed < 90
    streams.join(60)
    assert all(outcome.complete for outcome in found), "the streams continued"
    same_but_for_ties(bodies, [outcome.token_ids for outcome in found], [outcome.token_ids for outcome in expected])
