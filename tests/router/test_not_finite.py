"""Answers of a replica whose model output is not finite continue on another one."""

from typing import Any

import pytest


def _ask(harness: Any, text: str = "hi", **fields: Any) -> Any:
    with harness.client() as client:
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}
        return client.post("/v1/chat/completions", json=body)


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_continues_on_another_replica(
    harness: Any, make_replica: Any, expected_reply: str, after: int, stream: bool
) -> None:
    sick, well = make_replica(replica_id="sick", not_finite_after=after), make_replica(replica_id="well")
    harness.start([sick, well])
    for number in range(4):
        answer = _ask(harness, f"question {number}", stream=stream)
        assert answer.status_code == 200
        if not stream:
            assert answer.json()["choices"][0]["message"]["content"] == expected_reply
        else:
            assert '"finish_reason":"stop"' in answer.text.replace(" ", "") and "error" not in answer.text
    assert all(not submit.HasField("source") for submit in well.submits), "its blocks are not used"


def test_a_single_replica_tries_again(harness: Any, make_replica: Any, expected_reply: str) -> None:
    replica = make_replica(not_finite_after=1, not_finite_left=1)
    harness.start([replica])
    answer = _ask(harness)
    assert answer.json()["choices"][0]["message"]["content"] == expected_reply
    assert len(replica.submits) == 2


def test_what_is_never_finite_fails_the_request_alone(harness: Any, make_replica: Any) -> None:
    replicas = [make_replica(replica_id=name, not_finite_after=0) for name in "abc"]
    harness.start(replicas)
    answer = _ask(harness)
    error = answer.json()["error"]
    assert answer.status_code == 500 and error["code"] == "generation_failed"
    assert "not finite" in error["message"] and "--dtype" in error["message"]
    assert sum(len(replica.submits) for replica in replicas) == 2
