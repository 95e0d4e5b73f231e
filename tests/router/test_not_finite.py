"""Answers of a replica whose model output is not finite continue on another one; its device may be defective."""

from typing import Any

import pytest

from headrace_proto.control_pb2 import NotFinite
from headrace_router.core.not_finite import AVOID_SECONDS, COUNTED_SECONDS, MAX_PAIRS, MAX_PROMPTS, NotFiniteTable


def _ask(harness: Any, text: str = "hi", **fields: Any) -> Any:
    with harness.client() as client:
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}
        return client.post("/v1/chat/completions", json=body)


def _reported(harness: Any) -> list[NotFinite]:
    return list(harness.router.services.fleet.report("router").not_finite)


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
    (found,) = _reported(harness)
    assert (found.replica_id, found.generation, found.source_id) == ("sick", 1, "")
    assert 1 <= found.prompts <= 4
    assert len(sick.submits) < len(well.submits), "it is avoided for a while"
    assert all(not submit.HasField("source") for submit in well.submits), "its blocks are not used"


def test_the_same_prompt_counts_once(harness: Any, make_replica: Any) -> None:
    sick = make_replica(replica_id="sick", not_finite_after=0, not_finite_left=3)
    harness.start([sick])
    for _ in range(3):
        assert _ask(harness).status_code in (200, 500)
    assert [found.prompts for found in _reported(harness)] == [1]


def test_a_single_replica_tries_again(harness: Any, make_replica: Any, expected_reply: str) -> None:
    replica = make_replica(not_finite_after=1, not_finite_left=1)
    harness.start([replica])
    answer = _ask(harness)
    assert answer.json()["choices"][0]["message"]["content"] == expected_reply
    assert len(replica.submits) == 2 and [found.prompts for found in _reported(harness)] == [1]


def test_what_is_never_finite_fails_the_request_alone(harness: Any, make_replica: Any) -> None:
    replicas = [make_replica(replica_id=name, not_finite_after=0) for name in "abc"]
    harness.start(replicas)
    answer = _ask(harness)
    error = answer.json()["error"]
    assert answer.status_code == 500 and error["code"] == "generation_failed"
    assert "not finite" in error["message"] and "--dtype" in error["message"]
    assert sum(len(replica.submits) for replica in replicas) == 2
    assert _reported(harness) == [], "the prompt or the model is the cause: no replica counts"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0


def test_the_table_forgets_and_is_bounded() -> None:
    clock = Clock()
    table = NotFiniteTable(lambda: clock.now)
    for number in range(2 * MAX_PROMPTS):
        table.add(("a", 1), None, b"%d" % number)
    for number in range(2 * MAX_PAIRS):
        table.add(("b", number), ("p", 1), b"x")
    found = list(table.report())
    assert len(found) == MAX_PAIRS and {entry.prompts for entry in found} == {1}
    assert table.avoids(("b", 3)) and table.avoids(("p", 1)) and not table.avoids(("c", 1))
    clock.now += AVOID_SECONDS
    assert not table.avoids(("b", 3))
    table.add(("a", 1), None, b"y")
    clock.now += COUNTED_SECONDS - AVOID_SECONDS + 1
    assert [(entry.replica_id, entry.prompts) for entry in table.report()] == [("a", 1)]
    for number in range(2 * MAX_PROMPTS):
        table.add(("a", 1), None, b"%d" % number)
    assert [entry.prompts for entry in table.report()] == [MAX_PROMPTS]
