"""Requests of pages in a browser: answered for the origins that the operator allows."""

import socket
from typing import Any

import pytest
from pydantic import ValidationError

from headrace_router.config import RouterSettings

PAGE = "https://chat.example.com"
KEY = {"authorization": "Bearer key-12345"}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
ASKED = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


@pytest.fixture
def client(harness: Any, make_replica: Any) -> Any:
    harness.start([make_replica()], allowed_origins=["http://localhost:3000", PAGE], auth={"keys": ["key-12345"]})
    with harness.client() as made:
        yield made


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/health", "/nowhere"])
def test_the_question_before_a_request_needs_no_key(client: Any, path: str) -> None:
    allowed = client.options(path, headers={"origin": PAGE, **ASKED})
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == PAGE
    assert allowed.headers["access-control-allow-headers"] == ASKED["access-control-request-headers"]
    assert "POST" in allowed.headers["access-control-allow-methods"] and allowed.headers["x-request-id"]
    for other in ("https://chat.example.com.evil.org", "http://chat.example.com", f"{PAGE}:8443", "null"):
        refused = client.options(path, headers={"origin": other, **ASKED})
        assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers
    assert client.options(path, headers={"origin": PAGE}).status_code in (401, 405), "no such question"


def test_the_body_of_a_question_is_not_read(client: Any, harness: Any) -> None:
    head = f"OPTIONS /v1/models HTTP/1.1\r\nhost: x\r\norigin: {PAGE}\r\ncontent-length: 1000000\r\n"
    with socket.create_connection(("127.0.0.1", harness.router.http_port), 20) as connection:
        connection.sendall(f"{head}access-control-request-method: GET\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n") and b"\r\nconnection: close\r\n" in answer


def test_answers_and_errors_can_be_read_by_the_page(client: Any) -> None:
    own = {"origin": PAGE} | KEY
    answers = [
        client.post("/v1/chat/completions", json=CHAT, headers=own),
        client.post("/v1/chat/completions", json=CHAT | {"stream": True}, headers=own),
        client.post("/v1/chat/completions", json=CHAT | {"model": "none"}, headers=own),
        client.post("/v1/chat/completions", json=CHAT, headers={"origin": PAGE}),
        client.get("/nowhere", headers=own),
        client.put("/v1/models", headers=own),
        client.get("/health", headers={"origin": PAGE}),
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 404, 401, 404, 405, 200]
    for answer in answers:
        assert answer.headers["access-control-allow-origin"] == PAGE and "Origin" in answer.headers["vary"]
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in answer.headers, "keys are in a header, not in a cookie"
    assert answers[1].text.endswith("data: [DONE]\n\n")
    other = client.get("/v1/models", headers={"origin": "https://evil.org"} | KEY)
    assert other.status_code == 200 and "access-control-allow-origin" not in other.headers


def test_all_origins_or_none(harness: Any, make_replica: Any) -> None:
    harness.start([make_replica()], allowed_origins="*")
    with harness.client() as client:
        asked = client.options("/v1/models", headers={"origin": PAGE, **ASKED})
        read = client.get("/v1/models", headers={"origin": PAGE})
        assert [answer.headers["access-control-allow-origin"] for answer in (asked, read)] == ["*"] * 2


def test_by_default_pages_cannot_call(shared: Any) -> None:
    with shared.client() as client:
        asked = client.options("/v1/models", headers={"origin": PAGE, **ASKED})
        assert asked.status_code == 405 and "access-control-allow-origin" not in asked.headers
        assert "access-control-allow-origin" not in client.get("/v1/models", headers={"origin": PAGE}).headers


def test_origins_as_operators_write_them() -> None:
    def read(given: Any) -> tuple[str, ...]:
        return RouterSettings.model_validate({"allowed_origins": given}).allowed_origins

    assert read(f" {PAGE}, HTTP://Localhost:3000,") == (PAGE, "http://localhost:3000")
    assert read(["app://obsidian.md", "null"]) == ("app://obsidian.md", "null")
    assert read(f'["{PAGE}/", "*"]') == (PAGE, "*")  # as vLLM's flag is written
    for wrong in ("chat.example.com", "https://*.example.com", f"{PAGE}/path"):
        with pytest.raises(ValidationError, match="is no origin: write it like https"):
            read(wrong)
