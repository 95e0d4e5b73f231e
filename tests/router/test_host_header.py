"""The Host header: without keys, a server is reached by names of its own machine only (DNS rebinding)."""

import pytest

from headrace_router.access.auth import AuthConfig, is_local_authority, needs_local_host
from support.router.harness import Harness

LOCAL = ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1", "127.0.0.1:1", "127.8.9.1:", "[::1]", "[::1]:8000"]
FOREIGN = [
    "example.org", "example.org:8000", "localhost.example.org", "127.0.0.1.example.org", "10.0.0.1", "[2001:db8::1]:80",
    "", ":8000", "::1:8000", "localhost@example.org", "localhost:8000:9", "localhost:x", "[localhost]", "127.1",
    "2130706433",
]  # fmt: skip


@pytest.mark.parametrize("value", LOCAL)
def test_local_names(value: str) -> None:
    assert is_local_authority(value.encode())


@pytest.mark.parametrize("value", FOREIGN)
def test_other_names(value: str) -> None:
    assert not is_local_authority(value.encode())


def test_a_server_without_keys_answers_for_local_names_only(shared: Harness) -> None:
    with shared.client() as client:
        for path in ("/v1/models", "/metrics", "/health", "/docs", "/nowhere"):
            answer = client.get(path, headers={"host": "rebound.example.org"})
            assert answer.status_code == 421 and answer.json()["error"]["code"] == "host_not_allowed", path
            assert "--api-keys-file" in answer.json()["error"]["message"]
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        assert client.post("/v1/chat/completions", json=body, headers={"host": "a.example"}).status_code == 421
        for value in ("localhost", "127.0.0.1:1", "[::1]:9"):
            assert client.get("/v1/models", headers={"host": value}).status_code == 200


@pytest.mark.parametrize(
    ("host", "auth", "needed"),
    [
        ("127.0.0.1", AuthConfig(), True),
        ("::1", AuthConfig(), True),
        ("127.0.0.1", AuthConfig(allow_no_auth=True), False),  # as behind a proxy that checks
        ("0.0.0.0", AuthConfig(allow_no_auth=True), False),
        ("127.0.0.1", AuthConfig.model_validate({"keys": ["sk-a-key-123"]}), False),
    ],
)
def test_where_it_is_checked(host: str, auth: AuthConfig, needed: bool) -> None:
    assert needs_local_host(host, auth) is needed
