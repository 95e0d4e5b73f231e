"""The controller changes a replica's role or state: new requests are placed accordingly, streams stay."""

import threading
from typing import Any

import httpx
import pytest

from headrace_proto.control_pb2 import Member, MemberList
from headrace_proto.replica_pb2 import (
    REPLICA_STATE_DRAINING,
    REPLICA_STATE_READY,
    ROLE_BOTH,
    ROLE_DECODE,
    ROLE_PREFILL,
    ReplicaIdentity,
    ReplicaState,
    Role,
)

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def _set_members(harness: Any, *entries: tuple[Role, ReplicaState]) -> None:
    """Applies a new member list, in the order of the replicas."""
    members = [
        Member(identity=ReplicaIdentity(replica_id=replica.replica_id, role=role), address=replica.address, state=state)
        for replica, (role, state) in zip(harness.replicas, entries, strict=True)
    ]

    async def update() -> None:
        harness.router.services.fleet.update(MemberList(members=members))

    harness.call(update())


def _post(harness: Any) -> httpx.Response:
    with harness.client() as client:
        return client.post("/v1/chat/completions", json=BODY)


@pytest.mark.parametrize(
    "change", [(ROLE_PREFILL, REPLICA_STATE_READY), (ROLE_BOTH, REPLICA_STATE_DRAINING)], ids=["prefill", "draining"]
)
def test_new_requests_are_placed_elsewhere_and_streams_continue(
    harness: Any, make_replica: Any, eventually: Any, change: tuple[Role, ReplicaState]
) -> None:
    leaving, staying = make_replica(replica_id="leaving", token_seconds=0.03), make_replica(replica_id="staying")
    harness.start([leaving, staying], disaggregation="auto")
    ready = (ROLE_BOTH, REPLICA_STATE_READY)
    _set_members(harness, ready, (ROLE_PREFILL, REPLICA_STATE_READY))
    answers: list[httpx.Response] = []
    streams = [threading.Thread(target=lambda: answers.append(_post(harness))) for _ in range(3)]
    for stream in streams:
        stream.start()
    eventually(lambda: len(leaving.submits) == 3)
    _set_members(harness, change, (ROLE_DECODE, REPLICA_STATE_READY))
    for _ in range(4):
        assert _post(harness).status_code == 200
    assert (len(leaving.submits), len(staying.submits)) == (3, 4)
    for stream in streams:
        stream.join(30)
    texts = {answer.json()["choices"][0]["message"]["content"] for answer in answers}
    assert [answer.status_code for answer in answers] == [200] * 3 and len(texts) == 1
    assert leaving.cancels == [] and len(staying.submits) == 4, "nothing moved"


def test_without_a_replica_that_decodes_the_model_is_not_ready(harness: Any, make_replica: Any) -> None:
    harness.start([make_replica(replica_id="a"), make_replica(replica_id="b")])
    _set_members(harness, (ROLE_PREFILL, REPLICA_STATE_READY), (ROLE_PREFILL, REPLICA_STATE_READY))
    with harness.client() as client:
        assert client.get("/health/ready").status_code == 503
        assert client.get("/health/live").status_code == 200
        assert _post(harness).status_code == 503
        _set_members(harness, (ROLE_PREFILL, REPLICA_STATE_READY), (ROLE_DECODE, REPLICA_STATE_READY))
        assert client.get("/health/ready").status_code == 200
        assert _post(harness).status_code == 200
