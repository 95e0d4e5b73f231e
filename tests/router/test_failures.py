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
from support.router.harness import Harness

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


def test_a_refused_request_is_sent_to_another_replica(harness: Any, make_replica: Any) -> None:
    full, free = make_replica(replica_id="full", refuse=True), make_replica(replica_id="free")
    harness.start([full, free])
    for _ in range(4):
        assert _post(harness).status_code == 200
    assert len(free.submits) == 4 and full.submits


def test_all_full_is_503_with_retry_after(harness: Any, make_replica: Any) -> None:
    harness.start([make_replica(refuse=True)])
    for stream in (False, True):
        answer = _post(harness, stream=stream)
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "overloaded"


def test_a_loss_before_the_first_token_is_hidden_from_the_client(
    harness: Any, make_replica: Any, expected_reply: str
) -> None:
    dying = make_replica(replica_id="a", die_after=0)
    harness.start([dying, make_replica(replica_id="b")])
    texts = [_post(harness).json()["choices"][0]["message"]["content"] for _ in range(4)]
    assert texts == [expected_reply] * 4 and dying.submits


def test_a_submit_that_cannot_be_sent_ends_the_stream_and_the_link_reconnects(
    harness: Any, make_replica: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link's reader alone would not detect it, and no later submit would be sent."""
    harness.start([make_replica()])
    (replica,) = harness.router.services.fleet.replicas
    take = replica.submit_queue.take
    frames = iter([ValueError("out of range")])

    def fail_once() -> Any:
        frame = take()
        if frame is not None and frame.submits and next(frames, None) is not None:
            raise ValueError("out of range")
        return frame

    monkeypatch.setattr(replica.submit_queue, "take", fail_once)
    assert _post(harness).status_code == 503, "there is no other replica"
    eventually(lambda: _post(harness).status_code == 200)


def test_maintenance_continues_after_an_error(
    harness: Any, make_replica: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.start([make_replica()])
    fleet = harness.router.services.fleet
    calls: list[float] = []

    def fail(now: float) -> None:
        calls.append(now)
        raise ZeroDivisionError

    monkeypatch.setattr(fleet, "rebalance", fail)
    eventually(lambda: len(calls) > 2)
    assert _post(harness).status_code == 200


def test_an_attempt_that_a_stopping_replica_cancels_is_lost(
    harness: Any, make_replica: Any, expected_reply: str
) -> None:
    stopping, other = make_replica(replica_id="a", cancels_all=True), make_replica(replica_id="b")
    harness.start([stopping, other])
    texts = [_post(harness).json()["choices"][0]["message"]["content"] for _ in range(4)]
    assert texts == [expected_reply] * 4 and stopping.submits
    other.cancels_all = True
    answer = _post(harness)
    assert answer.status_code == 422 and answer.json()["error"]["code"] == "replicas_lost"


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


def test_cached_tokens_are_those_of_the_first_replica(harness: Any, make_replica: Any) -> None:
    """On the next replica, the blocks that were fetched are in its cache, including the stream's own tokens."""
    dying, other = make_replica(replica_id="a", die_after=5), make_replica(replica_id="b", cached_tokens=77)
    harness.start([dying, other])
    found = []
    while not dying.submits:
        found = [_post(harness, stream=False).json()["usage"]["prompt_tokens_details"]["cached_tokens"]]
    assert other.submits[-1].output_token_ids, "it continued there"
    assert found == [3]


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


def test_the_migrations_of_a_stream_are_limited(harness: Any, make_replica: Any) -> None:
    harness.start([make_replica(replica_id=name, die_after=2) for name in "abcd"], migration_limit=2)
    answer = _post(harness)
    assert answer.status_code == 422 and answer.json()["error"]["code"] == "replicas_lost"
    assert "3 replicas were lost" in answer.json()["error"]["message"]


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


def test_skipped_tokens_count_as_a_lost_replica(harness: Any, make_replica: Any) -> None:
    harness.start([make_replica(skip_after=3)])
    answer = _post(harness)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "replica_lost"


def test_a_replica_that_sends_more_tokens_than_requested_counts_as_lost(harness: Any, make_replica: Any) -> None:
    harness.start([make_replica(ignore_max_tokens=True)])
    answer = _post(harness, max_tokens=3)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "replica_lost"
    assert _post(harness).status_code == 200


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


@pytest.mark.faults("router")  # on a busy machine the frames of the pause are read too late
def test_a_router_that_was_paused_keeps_the_streams_of_its_replicas(
    harness: Any, make_replica: Any, eventually: Any, expected_reply: str
) -> None:
    """For longer than `stall_seconds`: the frames of that time are not read yet. It dropped all healthy replicas."""
    replicas = Harness()  # their event loop is not paused
    replica = make_replica(token_seconds=0.05)
    replicas.call(replica.start())
    try:
        members = (StaticMember(address=replica.address, replica_id=replica.replica_id),)
        harness.start([], members=members, stall_seconds=2.0)
        eventually(lambda: harness.router.services.ready)
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(_post(harness)))
        thread.start()
        eventually(lambda: bool(replica.submits))
        harness.loop.call_soon_threadsafe(time.sleep, 3.0)
        thread.join(30)
        assert answers[0].json()["choices"][0]["message"]["content"] == expected_reply
        assert (replica.streams, len(replica.submits)) == (1, 1)
    finally:
        replicas.call(replica.kill())
        replicas.close()


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


def test_a_draining_member_finishes_but_gets_no_new_requests(harness: Any, make_replica: Any, eventually: Any) -> None:
    leaving, staying = make_replica(replica_id="a", token_seconds=0.02), make_replica(replica_id="b")
    harness.start([leaving, staying])
    leaving.load.draining = True
    eventually(lambda: sum(link.ready for link in harness.router.services.fleet.replicas) == 1)
    for _ in range(3):
        assert _post(harness).status_code == 200
    assert len(staying.submits) == 3 and not leaving.submits
    _add_member(harness, [staying])
    eventually(lambda: len(harness.router.services.fleet.replicas) == 1)


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


def test_a_request_at_which_two_replicas_are_lost_is_not_run_again(
    harness: Any, make_replica: Any, expected_reply: str
) -> None:
    """An error that clients do not answer with a retry."""
    harness.start([make_replica(replica_id=name, die_after=0) for name in "ab"] + [make_replica(replica_id="c")])
    third = harness.replicas[2]
    third.load.kv_usage, third.load.running = 0.9, 3  # the others are chosen first
    time.sleep(0.1)
    answer = _post(harness)
    assert answer.status_code == 422 and answer.json()["error"]["code"] == "replicas_lost"
    assert "retry-after" not in answer.headers and not third.submits
    assert _post(harness).json()["choices"][0]["message"]["content"] == expected_reply


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


def test_the_end_of_one_choice_sends_no_comment(harness: Any, make_replica: Any) -> None:
    harness.start([make_replica(stagger_seconds=0.3)])
    assert "keep-alive" not in _post(harness, stream=True, max_tokens=3, n=2).text


def test_a_deadline_ends_the_request_and_frees_it(harness: Any, make_replica: Any, eventually: Any) -> None:
    replica = make_replica(first_seconds=20)
    harness.start([replica], limits={"request_seconds": 0.3})
    answer = _post(harness)
    assert answer.status_code == 504 and answer.json()["error"]["code"] == "deadline_exceeded"
    assert 0 < replica.submits[0].deadline_ms <= 300
    eventually(lambda: len(replica.cancels) == 1)


def test_shutdown_lets_streams_finish_and_refuses_new_requests(harness: Any, make_replica: Any) -> None:
    harness.start([make_replica(token_seconds=0.01)], shutdown_seconds=5)
    texts: list[str] = []
    thread = threading.Thread(target=lambda: texts.append(_post(harness, stream=True).text))
    thread.start()
    time.sleep(0.3)
    harness.call(harness.router.stop())
    thread.join(30)
    assert texts[0].endswith("data: [DONE]\n\n")
    with pytest.raises(httpx.ConnectError):
        _post(harness)
    harness.router = None
