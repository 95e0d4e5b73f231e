"""For every invalid body: an OpenAI error object, quickly, and the next valid request is answered."""

import json
import socket
import time
from typing import Any

import httpx
import pytest

from headrace_router.core.errors import UnsupportedError
from headrace_router.core.limits import Limits
from headrace_router.validation.bodies import ChatBody
from headrace_router.validation.body_errors import PART_KINDS, parse_body

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
STRICT: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "strict": True, "parameters": {"type": "object", "not": {"type": "null"}}},
}
TEXT: dict[str, Any] = {"name": "f", "parameters": {"type": "string"}}
CALL: dict[str, Any] = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
GOOD: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def _with(**fields: Any) -> bytes:
    return json.dumps({**GOOD, **fields}).encode()


def _raw(fragment: str) -> bytes:
    """The valid request with one more field, as raw JSON text."""
    return (json.dumps(GOOD)[:-1] + "," + fragment + "}").encode()


CHAT_CORPUS: dict[str, tuple[bytes, int]] = {
    "empty": (b"", 400),
    "not json": (b"{nope", 400),
    "a list": (b"[]", 400),
    "bad utf-8": (b'{"model":"\xff"}', 400),
    "NaN": (_raw('"temperature":NaN'), 400),
    "1e400": (_raw('"temperature":1e400'), 400),
    "2**63 seed": (_with(seed=2**63), 400),
    "long integer": (_raw('"seed":' + "9" * 10000), 400),
    "no tokens": (_with(max_tokens=0), 400),
    "many choices": (_with(n=129), 400),
    "float for int": (_with(max_tokens=1.5), 400),
    "bool for int": (_with(max_tokens=True), 400),
    "hot": (_with(temperature=2.1), 400),
    "top_p below zero": (_with(top_p=-0.1), 400),
    "surrogate": (_raw('"user":"\\ud800"'), 400),
    "depth 20000": (b'{"a":' * 20000 + b"1" + b"}" * 20000, 400),
    "depth 100": (_raw('"metadata":' + '{"a":' * 100 + "1" + "}" * 100), 400),
    "unknown model": (_with(model="gpt-9"), 404),
    "no model": (b'{"messages":[{"role":"user","content":"x"}]}', 400),
    "no messages": (_with(messages=[]), 400),
    "unknown role": (_with(messages=[{"role": "boss", "content": "x"}]), 400),
    "calls of a user": (_with(messages=[{"role": "user", "content": "x", "tool_calls": [CALL]}]), 400),
    "no content": (_with(messages=[{"role": "user"}]), 400),
    "image": (_with(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]), 400),
    "audio": (_with(messages=[{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]), 400),
    "strange part": (_with(messages=[{"role": "user", "content": [{"type": "hologram"}]}]), 400),
    "too many messages": (_with(messages=GOOD["messages"] * 3000), 400),
    "million bad messages": (_with(messages=[1] * 500_000), 400),
    "bad stops": (_with(stop=[1] * 100_000), 400),
    "tool without a name": (_with(tools=[{"type": "function", "function": {}}]), 400),
    "name of a tool": (_with(tools=[{"type": "function", "function": {"name": "a b"}}]), 400),
    "a flat tool": (_with(tools=[{"type": "function", "name": "f", "parameters": {}}]), 400),
    "parameters of a text": (_with(tools=[{"type": "function", "function": TEXT}]), 400),
    "any tool": (_with(tools=[TOOL], tool_choice="any"), 400),
    "two tools of one name": (_with(tools=[TOOL, TOOL]), 400),
    "no tool to choose": (_with(tool_choice="required"), 400),
    "unknown choice": (_with(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}), 400),
    "schema of a tool": (_with(tools=[STRICT], tool_choice="required"), 400),
    "json schema": (_with(response_format={"type": "json_schema", "json_schema": {}}), 400),
    "unknown field": (_with(quantum=1), 400),
    "many fields": (json.dumps({str(i): i for i in range(100_000)}).encode(), 400),
    "big bias": (_with(logit_bias={str(i): 1 for i in range(100_000)}), 400),
    "bias not a token": (_with(logit_bias={"x": 1}), 400),
    "bias outside": (_with(logit_bias={"999999": 1}), 400),
    "stop token outside": (_with(stop_token_ids=[999999]), 400),
    "empty stop": (_with(stop=""), 400),
    "long stop": (_with(stop="x" * 5000), 400),
    "top_logprobs alone": (_with(top_logprobs=3), 400),
    "top_logprobs 21": (_with(logprobs=True, top_logprobs=21), 400),
    "min over max": (_with(min_tokens=5), 400),
    "stream options alone": (_with(stream_options={"include_usage": True}), 400),
    "context": (_with(messages=[{"role": "user", "content": "word " * 2000}]), 400),
    "huge prompt": (_with(messages=[{"role": "user", "content": "x" * 3_000_000}]), 400),
    "huge body": (_with(user="x" * (5 << 20)), 413),
}


# Bodies to which a field can be appended, so that the same error is tested with a stream, too.
STREAMABLE = [
    name
    for name, (body, _) in CHAT_CORPUS.items()
    if body.startswith(b'{"model"') and body.endswith(b"}") and name != "stream options alone"
]


@pytest.mark.parametrize(
    ("name", "stream"), [(name, False) for name in CHAT_CORPUS] + [(name, True) for name in STREAMABLE]
)
def test_hostile_chat_bodies(shared: Any, name: str, stream: bool) -> None:
    body, status = CHAT_CORPUS[name]
    if stream:
        body = body[:-1] + b',"stream":true}'
    with shared.client() as client:
        answer = client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == status, answer.text[:300]
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error" and error["message"]
        assert len(answer.content) < 8192
        for leak in ("Traceback", "site-packages", ".py", "pydantic", "xxxxxxxxxx"):
            assert leak not in answer.text
        assert answer.headers["x-request-id"]
        assert client.post("/v1/chat/completions", json=GOOD).status_code == 200


@pytest.mark.parametrize(
    ("name", "code", "param"),
    [
        ("unknown model", "model_not_found", "model"),
        ("context", "context_length_exceeded", "messages"),
        ("tool without a name", "missing_required_parameter", "tools[0].function.name"),
        ("two tools of one name", None, "tools"),
        ("a flat tool", "invalid_value", "tools[0]"),
        ("any tool", "invalid_value", "tool_choice"),
        ("parameters of a text", None, "tools[0].function.parameters"),
        ("unknown field", "unknown_parameter", "quantum"),
        ("hot", "invalid_value", "temperature"),
        ("unknown role", "invalid_value", "messages[0].role"),
        ("image", "unsupported_parameter", "messages[0].content[0].type"),
        ("audio", "unsupported_parameter", "messages[0].content[0].type"),
        ("strange part", "invalid_value", "messages[0].content[0].type"),
        ("no model", "missing_required_parameter", "model"),
    ],
)
def test_errors_name_code_and_field(shared: Any, name: str, code: str, param: str) -> None:
    with shared.client() as client:
        content = CHAT_CORPUS[name][0]
        answer = client.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param), error


@pytest.mark.parametrize("kind", PART_KINDS)
def test_parts_that_are_not_text_are_refused_by_name(kind: str) -> None:
    """Whether or not the model of the checkpoint could read them."""
    body = GOOD | {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind, kind: {}}]}]}
    with pytest.raises(UnsupportedError, match=f"'{kind}' are not supported: this server reads and answers text only"):
        parse_body(ChatBody, body, Limits())


def test_context_error_has_both_numbers(shared: Any) -> None:
    with shared.client() as client:
        answer = client.post("/v1/completions", json={"model": "tiny", "prompt": [5] * 300})
    assert answer.status_code == 400
    assert "256" in answer.json()["error"]["message"] and "300" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": []},
        {"prompt": ""},
        {"prompt": [[]]},
        {"prompt": [1, "a"]},
        {"prompt": [-1]},
        {"prompt": [2**40]},
        {"prompt": [True]},
        {"prompt": [399999]},
        {"prompt": {}},
        {"prompt": [1] * 1_000_000},
        {"prompt": ["x"] * 1000},
        {"prompt": "x", "best_of": 2},
        {"prompt": "x", "suffix": "y"},
        {"prompt": "x", "echo": True, "logprobs": 99},
        {"prompt": "x", "prompt_logprobs": 99},
        {"prompt": "x", "logprobs": 21},
    ],
)
def test_hostile_completions(shared: Any, fields: dict[str, Any]) -> None:
    with shared.client() as client:
        answer = client.post("/v1/completions", json={"model": "tiny", **fields})
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


def test_routes_methods_and_media_types(shared: Any) -> None:
    with shared.client() as client:
        for method, path, status in [
            ("GET", "/nowhere", 404),
            ("GET", "/v1/models/none", 404),
            ("GET", "/v1/chat/completions/", 404),
            ("GET", "/v1/chat/completions", 405),
            ("DELETE", "/v1/models", 405),
        ]:
            answer = client.request(method, path)
            assert answer.status_code == status and set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert "POST" in client.get("/v1/chat/completions").headers["allow"]
        for kind in ("text/plain", "application/x-www-form-urlencoded", "", "application/json; charset=latin-1"):
            answer = client.post("/v1/chat/completions", content=b"{}", headers={"content-type": kind})
            assert answer.status_code == 415 and answer.json()["error"]["code"] == "unsupported_media_type"
        answer = client.post(
            "/v1/chat/completions", json=GOOD, headers={"content-encoding": "gzip", "content-type": "application/json"}
        )
        assert answer.status_code == 415


def _exchange(shared: Any, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", shared.router.http_port), 5) as sock:
        sock.sendall(request)
        sock.settimeout(5)
        received = b""
        try:
            while piece := sock.recv(65536):
                received += piece
        except ConnectionResetError:
            pass
        return received


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nbig: " + b"a" * 100_000 + b"\r\n\r\n", b"431"),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nendless: " + b"a" * 200_000, b"431"),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"a:b\r\n" * 1000 + b"\r\n", b"431"),
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n", b"431"),
        (b"GET /\xff\xfe HTTP/1.1\r\nhost: localhost\r\n\r\n", b"400"),
    ],
)
def test_input_that_is_not_http(shared: Any, request_bytes: bytes, status: bytes) -> None:
    received = _exchange(shared, request_bytes)
    assert received.startswith(b"HTTP/1.1 " + status), received[:200]
    assert b'"error"' in received and b"x-request-id" in received


def test_a_chunked_body_is_bounded_without_its_length(shared: Any) -> None:
    def pieces() -> Any:
        for _ in range(100):
            yield b" " * 65536

    with shared.client() as client:
        answer = client.post(
            "/v1/chat/completions", content=pieces(), headers={"content-type": "application/json"}, timeout=10
        )
        assert answer.status_code == 413 and answer.json()["error"]["code"] == "request_too_large"


def test_null_fields_count_as_absent(shared: Any) -> None:
    nulls = dict.fromkeys(
        ["tools", "temperature", "stop", "response_format", "logit_bias", "seed", "n", "stream", "metadata", "audio"]
    )
    with shared.client() as client:
        answer = client.post("/v1/chat/completions", json={**GOOD, **nulls})
        assert answer.status_code == 200, answer.text
        harmless = {"response_format": {"type": "text"}, "tools": [], "store": False, "service_tier": "auto"}
        assert client.post("/v1/chat/completions", json={**GOOD, **harmless}).status_code == 200


def test_slow_bodies_time_out(harness: Any, make_replica: Any) -> None:
    harness.start([make_replica()], limits={"body_seconds": 0.2})

    def slowly() -> Any:
        yield b"{"
        time.sleep(1)
        yield b"}"

    with harness.client() as client:
        try:
            answer = client.post("/v1/completions", content=slowly(), headers={"content-type": "application/json"})
        except httpx.HTTPError:
            pytest.fail("the connection was cut instead of answered")
    assert answer.status_code == 408
