"""Routers and replicas of two releases serve together: one side pretends to be of the release before or of the next one
(docs/reliability.md I20).
"""

from typing import Any

import pytest
import structlog.testing

import headrace_proto
from headrace_proto import replica_pb2 as pb
from headrace_router.core.replica_state import ReplicaState
from headrace_router.replicas import replica_link
from headrace_worker.server.description import Description
from headrace_worker.server.servicer import Servicer
from support.other_release import earlier, later

OWN = 5  # the version of the side that does not pretend
PROMPTS = [[10 + number, 11, 12, 13, 14] for number in range(4)]


def _answers(cluster: Any) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        answer = cluster.complete(prompt, max_tokens=12, logprobs=1)
        assert answer.status_code == 200, answer.text
        found.append(answer.json()["choices"][0]["token_ids"])
    return found


def _pretend(monkeypatch: pytest.MonkeyPatch, owner: Any, method: str, change: Any) -> None:
    """Changes the last argument, a message that arrives."""
    receive = getattr(owner, method)
    monkeypatch.setattr(owner, method, lambda self, *given: receive(self, *given[:-1], change(given[-1])))


def _versions(monkeypatch: pytest.MonkeyPatch, *, router: int, replica: int) -> None:
    monkeypatch.setattr(headrace_proto, "CONTRACT_VERSION", replica)  # as `is_compatible` reads it
    monkeypatch.setattr(replica_link, "CONTRACT_VERSION", router)


@pytest.mark.parametrize("release", [-1, 1])
def test_a_router_of_another_release_is_served(cluster: Any, monkeypatch: pytest.MonkeyPatch, release: int) -> None:
    cluster.add_replica()

    def change(frame: pb.RouterFrame) -> pb.RouterFrame:
        for submit in frame.submits:
            earlier(submit, "source", "priority", "request_label")
        return later(frame) if release > 0 else frame

    if release < 0:
        monkeypatch.setattr(replica_link.ReplicaLinks, "report_interval_ms", 0)  # it requests none
    _versions(monkeypatch, router=OWN + release, replica=OWN)
    _pretend(monkeypatch, Servicer, "_handle_frame", change)
    cluster.open()
    other = _answers(cluster)
    monkeypatch.undo()
    assert other == _answers(cluster)


@pytest.mark.parametrize("release", [-1, 1])
def test_a_replica_of_another_release_is_used(cluster: Any, monkeypatch: pytest.MonkeyPatch, release: int) -> None:
    cluster.add_replica()
    cluster.add_replica()
    _versions(monkeypatch, router=OWN, replica=OWN + release)
    describe = ReplicaState.describe

    def change(frame: pb.ReplicaFrame) -> pb.ReplicaFrame:
        if release < 0:
            earlier(frame.load.counters, "idle_steps")
        return later(frame) if release > 0 else earlier(frame, "submits")

    def described(self: Any, facts: pb.ModelFacts, card: Any) -> None:
        describe(self, later(facts) if release > 0 else earlier(facts, "defaults", "max_num_batched_tokens"), card)

    if release < 0:
        chunks = Description.chunks
        monkeypatch.setattr(Description, "chunks", lambda self, known_digest, **_: chunks(self, known_digest))
    _pretend(monkeypatch, ReplicaState, "receive", change)
    monkeypatch.setattr(ReplicaState, "describe", described)
    cluster.open()
    other = _answers(cluster)
    monkeypatch.undo()
    assert other == _answers(cluster)


@pytest.mark.parametrize(("router", "replica"), [(OWN + 2, OWN), (OWN, OWN + 2), (0, 1)])
def test_releases_that_are_further_apart_are_refused(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, router: int, replica: int
) -> None:
    """A peer of two versions before may misinterpret messages; 0: it sends none."""
    cluster.add_replica()
    _versions(monkeypatch, router=router, replica=replica)
    with structlog.testing.capture_logs() as logs:
        cluster.open(await_ready=False)
        cluster.eventually(lambda: any("may differ by one" in entry.get("reason", "") for entry in logs))
    assert cluster.ready == []
