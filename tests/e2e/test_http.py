"""HTTP on the wire: events, headers, routes, hostile bodies."""

import json
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from support.e2e.headrace_process import Serve
from support.e2e.metrics_page import Metrics

README = Path(__file__).parents[2] / "README.md"
MODEL = "smollm2"
GOOD: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Say hello."}],
    "max_tokens": 4,
    "temperature": 0,
}
CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


def _with(**fields: Any) -> bytes:
    return json.dumps(GOOD | fields).encode()


def _raw(fragment: str) -> bytes:
    """The good request with one more field, as raw JSON."""
    return (json.dumps(GOOD)[:-1] + "," + fragment + "}").encode()


def _user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


HOSTILE: dict[str, tuple[bytes, int]] = {
    "nothing": (b"", 400),
    "not json": (b"{nope", 400),
    "a list": (b"[]", 400),
    "wrong types": (_with(messages="hello", max_tokens="many"), 400),
    "NaN": (_raw('"top_p":NaN'), 400),
    "infinity": (_raw('"top_p":-Infinity'), 400),
    "1e400": (_raw('"top_p":1e400'), 400),
    "2**63": (_with(seed=2**63), 400),
    "10,000 digits": (_raw('"seed":' + "9" * 10_000), 400),
    "negative": (_with(max_tokens=-5), 400),
    "huge n": (_with(n=2**31), 400),
    "huge n times tokens": (_with(n=128, max_tokens=2_000_000_000), 400),
    "depth 20,000": (b'{"a":' * 20_000 + b"1" + b"}" * 20_000, 400),
    "list depth 20,000": (_raw('"metadata":' + "[" * 20_000 + "]" * 20_000), 400),
    "lone surrogate": (_raw('"user":"\\ud800"'), 400),
    "broken utf-8": (b'{"model":"\xff\xfe"}', 400),
    "unknown model": (_with(model="gpt-9"), 404),
    "model that is a path": (_with(model="../../etc/passwd"), 404),
    "no messages": (_with(messages=[]), 400),
    "unknown role": (_with(messages=[{"role": "boss", "content": "x"}]), 400),
    "image": (_with(messages=_user([{"type": "image_url", "image_url": {"url": "http://192.0.2.1/x"}}])), 400),
    "audio": (_with(messages=_user([{"type": "input_audio", "input_audio": {}}])), 400),
    "regular expression": (_with(regex="(a+)+b"), 400),
    "tools": (_with(tools=[{"type": "function", "function": {"name": "a b"}}]), 400),
    "token outside": (_with(logit_bias={"49152": 1}), 400),
    "long prompt": (_with(messages=_user("word " * 5_000)), 400),
    "a million characters and more": (_with(messages=_user("x" * 1_100_000)), 400),
    "huge body": (_with(user="x" * (5 << 20)), 413),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bodies_get_an_error_object_and_have_no_effect(http: httpx.Client, name: str, stream: bool) -> None:
    body, status = HOSTILE[name]
    if stream and body.endswith(b"}"):
        body = body[:-1] + b',"stream":true}'
    answer = http.post(CHAT, content=body, headers=JSON)
    assert answer.status_code == status, answer.text[:300]
    _check_error(answer)
    good = http.post(CHAT, json=GOOD)
    assert good.status_code == 200 and good.json()["choices"][0]["message"]["content"]


def _check_error(answer: httpx.Response) -> None:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert answer.headers["content-type"].startswith("application/json")
    assert len(answer.content) < 8192
    assert answer.headers["x-request-id"]
    for leak in ("Traceback", "site-packages", ".py", "pydantic", "object at 0x"):
        assert leak not in answer.text


def test_hostile_bodies_during_a_stream(http: httpx.Client) -> None:
    body = GOOD | {"max_tokens": 48, "ignore_eos": True, "stream": True}
    with http.stream("POST", CHAT, json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        for name in ("depth 20,000", "huge body", "NaN", "long prompt"):
            assert http.post(CHAT, content=HOSTILE[name][0], headers=JSON).status_code >= 400
        assert [line for line in lines if line][-1] == "data: [DONE]"


@pytest.mark.parametrize(
    ("method", "path", "options", "status"),
    [
        ("GET", "/nowhere", {}, 404),
        ("GET", "/v1/models/none", {}, 404),
        ("GET", "/v1/../etc/passwd", {}, 404),
        ("GET", CHAT, {}, 405),
        ("DELETE", "/v1/models", {}, 405),
        ("POST", CHAT, {"content": _with(), "headers": {"content-type": "text/plain"}}, 415),
        ("POST", CHAT, {"content": _with(), "headers": {"content-type": "multipart/form-data; boundary=x"}}, 415),
        ("POST", "/v1/completions", {"json": {"model": MODEL, "prompt": [0] * 3000}}, 400),
        ("POST", "/v1/completions", {"json": {"model": MODEL, "prompt": [49152]}}, 400),
    ],
)
def test_routes_methods_and_media_types(
    http: httpx.Client, method: str, path: str, options: dict[str, Any], status: int
) -> None:
    answer = http.request(method, path, **options)
    assert answer.status_code == status
    _check_error(answer)


def test_context_length_names_both_numbers_before_any_byte(http: httpx.Client) -> None:
    with http.stream("POST", "/v1/completions", json={"model": MODEL, "prompt": [5] * 2500, "stream": True}) as answer:
        answer.read()
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "2048" in error["message"] and "2500" in error["message"]


def test_events_of_a_stream(http: httpx.Client) -> None:
    body = GOOD | {
        "n": 2,
        "temperature": 1,
        "max_tokens": 12,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = http.post(CHAT, json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache" and answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["x-request-id"]
    assert re.fullmatch(r"(data: .+\n\n)+", answer.text)
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]" and lines.count("[DONE]") == 1
    chunks = [json.loads(line) for line in lines[:-1]]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] <= 24
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    for index in (0, 1):
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in own[1:])
        reasons = [choice["finish_reason"] for choice in own]
        assert reasons[-1] in ("stop", "length") and reasons[:-1] == [None] * (len(own) - 1)


def test_characters_are_never_cut(http: httpx.Client) -> None:
    """Every piece of a stream has whole characters, although one character may be several tokens."""
    text = "naïve 🙂 日本語 "
    bias = {"model": MODEL, "prompt": text * 6, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    whole = http.post("/v1/completions", json=bias).json()["choices"][0]["text"]
    answer = http.post("/v1/completions", json=bias | {"stream": True})
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    pieces = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(pieces) == whole
    assert any(ord(character) > 0x2000 for character in whole), "the model generates multi-byte characters"
    assert not any("�" in piece for piece in pieces)


def test_raw_sockets(server: Serve) -> None:
    """Raw requests: invalid, slow, truncated."""
    where = urlsplit(server.url)
    body = json.dumps(GOOD).encode()

    def send(*pieces: bytes) -> bytes:
        with socket.create_connection((where.hostname, where.port), timeout=20) as link:
            for piece in pieces:
                link.sendall(piece)
                time.sleep(0.05)
            link.shutdown(socket.SHUT_WR)
            received = b""
            while data := link.recv(65536):
                received += data
            return received

    head = f"POST {CHAT} HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\n".encode()
    close = b"Connection: close\r\n"
    assert b" 400 " in send(b"nonsense\r\n\r\n").splitlines()[0]
    assert b" 400 " in send(head + b"Content-Length: -5\r\n\r\n").splitlines()[0]
    length = b"Content-Length: %d\r\n\r\n" % len(body)
    send(head + length + body[:10])  # truncated in the body
    assert (
        send(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n" + b"X-A: " + b"y" * 100_000 + b"\r\n\r\n")
        .split(b" ")[1]
        .startswith(b"4")
    )
    with socket.create_connection((where.hostname, where.port), timeout=20) as link:
        link.sendall(head + close + length)
        for byte in body:
            link.sendall(bytes([byte]))
        received = b""
        while data := link.recv(65536):
            received += data
    assert b" 200 " in received.splitlines()[0]


def test_the_first_request_of_the_readme_has_a_short_correct_answer(http: httpx.Client) -> None:
    body = re.search(r"-d '(\{.*\})'", README.read_text())
    assert body is not None
    answer = http.post(CHAT, content=body[1].encode(), headers=JSON).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop" and "Paris" in choice["message"]["content"]
    (model,) = http.get("/v1/models").json()["data"]
    assert model["defaults"] == {"max_tokens": 512, "temperature": 0.0, "top_p": 0.9}
    assert answer["usage"]["completion_tokens"] < 40


def test_health_version_and_docs(http: httpx.Client) -> None:
    for path in ("/health", "/health/live", "/health/ready"):
        assert http.get(path).status_code == 200
        assert http.head(path).status_code == 200
    assert re.match(r"\d+\.\d+", http.get("/version").json()["version"])
    page = http.get("/docs")
    assert page.status_code == 200 and "openapi.json" in page.text
    loaded = re.findall(r"""(?:src|href)=["']?([^"'\s>]+)""", page.text)
    assert loaded == ["data:,"], "nothing is loaded: the icon is empty"
    assert CHAT in http.get("/openapi.json").json()["paths"]


def test_metrics_have_standard_names_and_correct_sums(
    http: httpx.Client, metrics: Callable[[], Metrics], eventually: Callable[..., None]
) -> None:
    before = metrics()
    requests: list[dict[str, int]] = [{"max_tokens": 1}, {"max_tokens": 3, "n": 2}, {"max_tokens": 6}]
    usages = [http.post(CHAT, json=GOOD | options).json()["usage"] for options in requests]
    spent = sum(usage["completion_tokens"] for usage in usages)
    read = sum(usage["prompt_tokens"] for usage in usages)

    def counted() -> bool:
        after = metrics()
        grown = {
            name: after[name] - before[name] for name in ("vllm:generation_tokens_total", "vllm:prompt_tokens_total")
        }
        return grown == {"vllm:generation_tokens_total": spent, "vllm:prompt_tokens_total": read}

    eventually(counted, 3, "that the token counters equal the sum of the usages")
    page = metrics()
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info")
    counters = [
        *("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits"),
        *("num_preemptions", "request_success"),
    ]
    seconds = [
        *("time_to_first_token", "inter_token_latency", "request_time_per_output_token", "e2e_request_latency"),
        "request_queue_time",
    ]
    expected = {f"vllm:{name}" for name in gauges} | {f"vllm:{name}_total" for name in counters}
    expected |= {f"vllm:{name}_seconds_{part}" for name in seconds for part in ("bucket", "sum", "count")}
    assert expected <= page.names()
    for name in expected:
        assert {"model_name", "replica"} <= page.labels(name), name
    assert all(name.startswith(("vllm:", "headrace_")) for name in page.names())
    assert page.value("vllm:request_success_total", model_name=MODEL, replica="smollm2-0") >= 3
    eventually(lambda: metrics().busy == {}, 3, "that nothing is busy")
