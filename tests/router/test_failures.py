"""Clients that disconnect, replicas that refuse, stall or are lost, and overload."""

import json
import threading
import time
from contextlib import closing
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from headrace_router.config import StaticMember

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def _post(harness: Any, **fields: Any) -> httpx.Response:
    with harness.client() as client:
        return client.post("/v1/chat/completions", json={**BODY, **fields})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_disconnect_cancels_at_the_replica(
    harness: Any, make_replica: Any, eventually: Any, stream: bool, phase: str
) -> None:
    replica = make_replica(token_seconds=0.05, first_seconds=20 if phase == "prefill" else 0)
    harness.start([replica])
    address = urlsplit(harness.url)
    with closing(HTTPConnection(address.hostname or "", address.port, timeout=5)) as client:
        headers = {"content-type": "application/json"}
        client.request("POST", "/v1/chat/completions", json.dumps({**BODY, "n": 2, "stream": stream}), headers)
        eventually(lambda: len(replica.submits) == 2)
        time.sleep(0.3)  # a few tokens, if it decodes
    eventually(lambda: {submit.attempt_id for submit in replica.submits} == set(replica.cancels))
    assert len(replica.submits) == 2
    eventually(lambda: harness.router.services.admission.running == 0)
    eventually(lambda: not any(link.attempts for link in harness.router.services.fleet.replicas))


def test_a_disconnect_removes_the_request_from_the_queue(harness: Any, make_replica: Any, eventually: Any) -> None:
    replica = make_replica(first_seconds=20)
    harness.start([replica], limits={"max_concurrent_requests": 1})
    admission = harness.router.services.admission
    for _ in range(2):
        with harness.client() as client, pytest.raises(httpx.ReadTimeout):
            client.post("/v1/chat/completions", json=BODY, timeout=httpx.Timeout(5, read=0.2))
    eventually(lambda: admission.running == 0)
    eventually(lambda: len(replica.cancels) == len(replica.submits))


def test_all_full_is_503_with_retry_after(harness: Any, make_replica: Any) -> None:
    harness.start([make_replica(refuse=True)])
    for stream in (False, True):
        answer = _post(harness, stream=stream)
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "overloaded"


def _text(answer: httpx.Response) -> str:
    """The text of a stream in which no event is an error."""
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n") if line.startswith("data: {")]
    assert not any("error" in event for event in events), events
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("die_after", [1, 5, 13])
def test_a_loss_after_tokens_only_delays_the_answer(
    harness: Any, make_replica: Any, expected_reply: str, die_after: int, stream: bool
) -> None:
    """Each token once, usage as without a loss, and the time to the first token counted once."""
    dying = [make_replica(replica_id=name, die_after=die_after, token_seconds=0.01) for name in "ab"]
    harness.start([*dying, make_replica(replica_id="c")], migration_limit=2)
    options = {"stream_options": {"include_usage": True}} if stream else {}
    for _ in range(3):
        answer = _post(harness, stream=stream, logprobs=True, **options)
        assert answer.status_code == 200
        if stream:
            assert _text(answer) == expected_reply and "[DONE]" in answer.text
            usage = json.loads([line for line in answer.text.split("\n") if '"usage":{' in line][-1][6:])["usage"]
        else:
            choice = answer.json()["choices"][0]
            assert choice["message"]["content"] == expected_reply
            shown = [byte for entry in choice["logprobs"]["content"] for byte in entry["bytes"]]
            assert bytes(shown).decode() == expected_reply
            usage = answer.json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 3
    assert all(replica.submits for replica in dying)
    with harness.client() as client:
        metrics = client.get("/metrics").text
    assert 'headrace_migrations_total{model_name="tiny"} 2.0' in metrics
    counts = [line for line in metrics.split("\n") if line.startswith("vllm:time_to_first_token_seconds_count")]
    assert sum(float(line.split()[-1]) for line in counts) == 3


def test_a_stream_waits_for_a_replica(harness: Any, make_replica: Any, eventually: Any, expected_reply: str) -> None:
    """The only replica is lost during an answer; its replacement continues the answer."""
    dying = make_replica(die_after=4, token_seconds=0.02)
    harness.start([dying])
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(_post(harness, stream=True)))
    thread.start()
    with harness.client() as client:
        eventually(lambda: client.get("/health").status_code == 503)
    back = make_replica(boot_id=b"c" * 16)
    back.address = dying.address
    harness.call(back.start())
    thread.join(30)
    assert _text(answers[0]) == expected_reply
    assert len(back.submits) == 1 and len(back.submits[0].output_token_ids) == 4


def test_no_ready_replica_in_time_ends_in_an_error_event(harness: Any, make_replica: Any) -> None:
    harness.start([make_replica(die_after=5, token_seconds=0.02)], migration_patience_seconds=0.5)
    answer = _post(harness, stream=True)
    last = [line for line in answer.text.split("\n") if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "replica_lost"
    assert "[DONE]" not in answer.text


def test_loss_of_the_only_replica_is_503(harness: Any, make_replica: Any, eventually: Any) -> None:
    harness.start([make_replica(die_after=0)])
    assert _post(harness).status_code == 503
    with harness.client() as client:
        eventually(lambda: client.get("/health").status_code == 503)
        assert client.get("/health/live").status_code == 200
        assert _post(harness).json()["error"]["code"] == "no_replica_ready"
        assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"


def test_a_failed_request_fails_alone(harness: Any, make_replica: Any) -> None:
    replica = make_replica(end_with_error=True)
    harness.start([replica])
    answer = _post(harness)
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "generation_failed"
    replica.end_with_error = False
    assert _post(harness).status_code == 200


@pytest.mark.faults("router")  # failed once beside other work
def test_a_stalled_replica_gets_no_requests_and_its_waiting_ones_move(
    harness: Any, make_replica: Any, eventually: Any, expected_reply: str
) -> None:
    slow = make_replica(replica_id="slow", first_seconds=0.2)
    harness.start([slow])
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(_post(harness)))
    thread.start()
    eventually(lambda: bool(slow.submits))
    slow.frozen = True
    with harness.client() as client:
        eventually(lambda: client.get("/health/ready").status_code == 503)
    other = make_replica(replica_id="other")
    harness.call(other.start())
    harness.replicas.append(other)
    _add_member(harness, [slow, other])
    thread.join(30)
    assert answers[0].status_code == 200, answers[0].text
    assert answers[0].json()["choices"][0]["message"]["content"] == expected_reply
    assert len(other.submits) == 1


def test_a_link_whose_replica_is_silent_for_long_is_opened_again(
    harness: Any, make_replica: Any, eventually: Any
) -> None:
    replica = make_replica()
    harness.start([replica], stall_seconds=2.0)
    assert replica.streams == 1
    replica.frozen = True
    eventually(lambda: replica.streams > 1)
    replica.frozen = False
    eventually(lambda: _post(harness).status_code == 200)
    assert replica.streams == 2, "its first step was read"


def _add_member(harness: Any, replicas: list[Any]) -> None:
    from headrace_router.replicas.membership import static_list

    members = tuple(StaticMember(address=r.address, replica_id=r.replica_id) for r in replicas)
    harness.loop.call_soon_threadsafe(harness.router.services.fleet.update, static_list(members))


def test_a_restarted_replica_is_found_again(harness: Any, make_replica: Any, eventually: Any, tokenizer: Any) -> None:
    first = make_replica()
    harness.start([first])
    assert _post(harness).status_code == 200
    harness.call(first.kill())
    again = make_replica(address=first.address, boot_id=b"c" * 16)
    harness.call(again.start())
    harness.replicas.append(again)
    eventually(lambda: _post(harness).status_code == 200)
    assert again.sent_tokenizers == 0  # the digest was known


def test_burst_is_spread_before_loads_are_reported(harness: Any, make_replica: Any) -> None:
    replicas = [make_replica(replica_id=name, first_seconds=0.3) for name in "abc"]
    harness.start(replicas)
    threads = [threading.Thread(target=_post, args=(harness,)) for _ in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(len(replica.submits) for replica in replicas) <= 4


@pytest.mark.parametrize("words", [1, 60])
def test_the_choices_of_a_request_run_on_one_replica(
    harness: Any, make_replica: Any, expected_reply: str, words: int
) -> None:
    """The others of a long prompt start when the first one has computed it, and find it in the prefix cache."""
    replicas = [make_replica(replica_id=name, first_seconds=0.2) for name in "abc"]
    harness.start(replicas)
    answer = _post(harness, n=4, messages=[{"role": "user", "content": "x7 " * words}])
    texts = [choice["message"]["content"] for choice in answer.json()["choices"]]
    assert texts == [expected_reply] * 4
    assert sorted(len(replica.submits) for replica in replicas) == [0, 0, 4]


def test_requests_beyond_the_queue_are_refused_at_once(harness: Any, make_replica: Any) -> None:
    harness.start([make_replica(first_seconds=0.5)], limits={"max_concurrent_requests": 2, "max_queued_requests": 1})
    codes: list[int] = []
    threads = [threading.Thread(target=lambda: codes.append(_post(harness).status_code)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(codes) == [200] * 3 + [503] * 5


def test_comments_are_sent_while_there_are_no_tokens(harness: Any, make_replica: Any) -> None:
    harness.start([make_replica(first_seconds=0.5)], keep_alive_seconds=0.1)
    text = _post(harness, stream=True, max_tokens=3).text
    assert text.startswith('data: {"id":"chatcmpl-')  # the role is first, before any comment
    assert text.count(": keep-alive\n\n") >= 3 and text.endswith("data: [DONE]\n\n")


def test_a_deadline_ends_the_request_and_frees_it(harness: Any, make_replica: Any, eventually: Any) -> None:
    replica = make_replica(first_seconds=20)
    harness.start([replica], limits={"request_seconds": 0.3})
    answer = _post(harness)
    assert answer.status_code == 504 and answer.json()["error"]["code"] == "deadline_exceeded"
    assert 0 < replica.submits[0].deadline_ms <= 300
    eventually(lambda: len(replica.cancels) == 1)
