"""What names a session of a client, for the policy that keeps sessions together; and the id that a client gets."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from headrace_proto.inference_pb2 import GenerateEvent, GenerateRequest
from headrace_proto.inference_pb2_grpc import InferenceStub

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


@pytest.fixture
def sessions(harness: Any, make_replica: Any) -> Any:
    harness.start([make_replica(replica_id=f"r{number}") for number in range(4)], policy="session")
    return harness


def _used(harness: Any) -> list[str]:
    """The replicas that got requests since the last call."""
    found = [replica.replica_id for replica in harness.replicas for _ in replica.submits]
    for replica in harness.replicas:
        replica.submits.clear()
    return found


def _grpc(harness: Any, metadata: Sequence[tuple[str, str]]) -> tuple[list[GenerateEvent], Any]:
    async def call() -> tuple[list[GenerateEvent], Any]:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{harness.router.grpc_port}") as channel:
            request = GenerateRequest(model="tiny", prompt="x")
            request.options.max_tokens = 2
            stream = InferenceStub(channel).Generate(request, metadata=tuple(metadata))
            return [event async for event in stream], await stream.trailing_metadata()

    found: tuple[list[GenerateEvent], Any] = harness.call(call())
    return found


def test_header_body_and_metadata_name_the_same_session(sessions: Any) -> None:
    with sessions.client() as client:
        for _ in range(4):
            assert client.post("/v1/chat/completions", json=CHAT, headers={"x-session-id": "s"}).status_code == 200
            assert client.post("/v1/chat/completions", json=CHAT | {"prompt_cache_key": "s"}).status_code == 200
            _grpc(sessions, [("x-session-id", "s")])
        assert len(Counter(_used(sessions))) == 1
        for number in range(24):
            headers = {"x-session-id": f"s{number}"}
            client.post("/v1/chat/completions", json=CHAT | {"prompt_cache_key": "s"}, headers=headers)
        assert len(Counter(_used(sessions))) > 1, "the header has precedence"
        for _ in range(8):
            client.post("/v1/chat/completions", json=CHAT)
        assert len(Counter(_used(sessions))) == 4, "without a session they are spread"


def _completion(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "x", "max_tokens": 2} | fields


def test_the_field_session_id_counts_after_the_others(sessions: Any) -> None:
    with sessions.client() as client:
        for _ in range(4):
            assert client.post("/v1/chat/completions", json=CHAT | {"session_id": "s"}).status_code == 200
            assert client.post("/v1/completions", json=_completion(session_id="s")).status_code == 200
            body = CHAT | {"session_id": "other", "prompt_cache_key": "s"}
            assert client.post("/v1/chat/completions", json=body).status_code == 200
            headers = {"x_session_id": "s"}
            body = _completion(session_id="another")
            assert client.post("/v1/completions", json=body, headers=headers).status_code == 200
        assert len(Counter(_used(sessions))) == 1
        for number in range(24):
            client.post("/v1/completions", json=_completion(session_id=f"s{number}"))
        assert len(Counter(_used(sessions))) > 1


def test_the_header_of_sessions_can_be_another_one(harness: Any, make_replica: Any) -> None:
    replicas = [make_replica(replica_id=f"r{number}") for number in range(4)]
    harness.start(replicas, policy="session", session_header="X-Conversation")
    with harness.client() as client:
        for number in range(8):
            headers = {"x-conversation": "s", "x-session-id": f"s{number}"}
            assert client.post("/v1/chat/completions", json=CHAT, headers=headers).status_code == 200
            _grpc(harness, [("x_conversation", "s"), ("x-session-id", f"s{number}")])
    assert len(Counter(_used(harness))) == 1


def test_the_names_of_sessions_are_bounded(sessions: Any) -> None:
    long = "s" * 513
    with sessions.client() as client:
        answer = client.post("/v1/chat/completions", json=CHAT, headers={"x-session-id": long})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "x-session-id"
        assert "'x-session-id' has 513 bytes; the limit is 512." in answer.json()["error"]["message"]
        for path, body in (
            ("/v1/chat/completions", CHAT | {"session_id": long}),
            ("/v1/chat/completions", CHAT | {"prompt_cache_key": long}),
            ("/v1/completions", _completion(session_id=long)),
        ):
            assert client.post(path, json=body).status_code == 400
        assert client.post("/v1/chat/completions", json=CHAT, headers={"x-session-id": long[1:]}).status_code == 200
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        _grpc(sessions, [("x-session-id", long)])
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_the_id_of_a_request_finds_its_account(sessions: Any, eventually: Any) -> None:
    accounts = sessions.router.services.accounts
    with sessions.client() as client:
        answer = client.post("/v1/chat/completions", json=CHAT)
        account = accounts.get(answer.headers["x-request-id"])
        assert account is accounts.get(answer.json()["id"])
        eventually(lambda: account.ended is not None and not account.failed)
        assert sum(account.parts.values()) == pytest.approx(account.ended - account.began)
        assert account.output_tokens == 2 and account.decisions[0].replica_id.startswith("r")
        refused = client.post("/v1/chat/completions", json=CHAT | {"model": "other"}, headers={"x-request-id": "mine"})
        assert refused.status_code == 404
        eventually(lambda: accounts.get("mine") is None)  # its account ends with it
    _, trailing = _grpc(sessions, [])
    assert accounts.get(dict(trailing)["x-request-id"]).output_tokens == 2
    _, trailing = _grpc(sessions, [("x-request-id", "given-1")])
    assert dict(trailing)["x-request-id"] == "given-1" and accounts.get("given-1").output_tokens == 2
    _, trailing = _grpc(sessions, [("x-request-id", "not valid")])
    assert len(dict(trailing)["x-request-id"]) == 32
