"""Every route and RPC without a key; exposed addresses; tenants."""

import asyncio
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from headrace_proto import inference_pb2, inference_pb2_grpc
from headrace_router.access import watched_files
from headrace_router.access.auth import (
    AuthConfig,
    Authenticator,
    ExposureError,
    KeysFileError,
    check_exposure,
    check_metrics_exposure,
)
from headrace_router.access.key_files import KeyFiles
from support.router.fake_replica import FakeReplica
from support.router.harness import Harness

KEY, OTHER, METRICS_KEY = "sk-first-key-1", "sk-second-key-2", "mk-metrics-key-3"
PUBLIC_PATHS = {"/", "/health", "/health/accepting", "/health/live", "/health/ready", "/docs", "/openapi.json"}


@pytest.fixture(scope="module")
def keyed(tokenizer: Any) -> Any:
    made = Harness()
    made.start([FakeReplica(tokenizer)], auth={"keys": [{"name": "one", "key": KEY}, {"name": "two", "key": OTHER}]})
    yield made
    made.close()


def _paths(harness: Any) -> list[tuple[str, str]]:
    """Every route of the application, as the application itself lists them."""
    app = harness.call(_app(harness))
    return [
        (method, route.path.replace("{model:path}", "tiny"))
        for route in app
        for method in sorted(getattr(route, "methods", None) or {"GET"})
    ]


async def _app(harness: Any) -> Any:
    from fastapi import FastAPI

    from headrace_router.api.http.app import add_generation, add_health, add_server

    app = FastAPI(docs_url=None, redoc_url=None)
    for add in (add_generation, add_health, add_server):
        add(app, harness.router.services)
    return app.routes


def test_every_route_needs_a_key_but_health(keyed: Any) -> None:
    paths = _paths(keyed)
    assert len(paths) >= 12
    with keyed.client() as client:
        for method, path in [*paths, ("GET", "/nowhere"), ("OPTIONS", "/v1/models"), ("GET", "/health/../metrics")]:
            answer = client.request(method, path)
            if path in PUBLIC_PATHS:
                assert answer.status_code == 200
                continue
            assert answer.status_code == 401, (method, path)
            assert answer.headers["www-authenticate"] == "Bearer"
            if method != "HEAD":
                error = answer.json()["error"]
                assert error.get("code") == "invalid_api_key" or error["type"] == "authentication_error"
            for header in ("Bearer wrong-key-123", f"Basic {KEY}", KEY, f"Bearer {KEY}x", "Bearer"):
                assert client.request(method, path, headers={"authorization": header}).status_code == 401
            assert client.request(method, path, headers={"authorization": f"Bearer {KEY}"}).status_code != 401


@pytest.mark.parametrize(
    "path",
    ["/%68ealth/../metrics", "//", "/./", "/%2f", "//health", "/health/", "/health%2f..%2fmetrics", "/Health"],
)
def test_only_the_exact_raw_path_needs_no_key(keyed: Any, path: str) -> None:
    import socket

    with socket.create_connection(("127.0.0.1", keyed.router.http_port), 5) as sock:
        sock.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        assert sock.recv(100).startswith(b"HTTP/1.1 401")


def test_the_documentation_contains_nothing_of_this_server(keyed: Any) -> None:
    """It is static, and describes the API: no model, no key."""
    with keyed.client() as client:
        pages = [client.get(path) for path in ("/docs", "/openapi.json")]
    assert all(page.status_code == 200 and "tiny" not in page.text and KEY not in page.text for page in pages)
    assert pages[1].json()["components"]["securitySchemes"]["key"]["scheme"] == "bearer", "for `Authorize`"


@pytest.fixture(scope="module")
def metered(tokenizer: Any) -> Any:
    made = Harness()
    made.start([FakeReplica(tokenizer)], auth={"keys": [KEY], "metrics_key": METRICS_KEY})
    yield made
    made.close()


def test_a_metrics_key_reads_metrics_and_nothing_else(metered: Any) -> None:
    headers = {"authorization": f"Bearer {METRICS_KEY}"}
    with metered.client() as client:
        for method, path in _paths(metered):
            answer = client.request(method, path, headers=headers)
            if path in PUBLIC_PATHS or path == "/metrics":
                assert answer.status_code == 200, (method, path)
            else:
                assert answer.status_code == 401, (method, path)
        for given in (KEY, f"{METRICS_KEY}x", METRICS_KEY[:-1]):
            refused = client.get("/metrics", headers={"authorization": f"Bearer {given}"})
            assert refused.status_code == 401 and given not in refused.text
        assert client.get("/metrics").status_code == 401
        assert client.get("/v1/models", headers={"authorization": f"Bearer {KEY}"}).status_code == 200


def test_every_rpc_needs_a_key_but_health(keyed: Any) -> None:
    async def walk() -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{keyed.router.grpc_port}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            serving = health_pb2.HealthCheckResponse.SERVING
            async with asyncio.timeout(5):
                async for answer in health.Watch(health_pb2.HealthCheckRequest()):
                    if answer.status == serving:
                        break
            inference = inference_pb2_grpc.InferenceStub(channel)
            request = inference_pb2.GenerateRequest(model="tiny", prompt="x")
            listing = reflection_pb2.ServerReflectionRequest(list_services="")
            reflect = reflection_pb2_grpc.ServerReflectionStub(channel)

            async def stream() -> Any:
                yield listing

            async def drain(call: Any) -> list[Any]:
                return [entry async for entry in call]

            unknown: Any = channel.unary_unary("/headrace.v1.Inference/Nothing")
            metadata = (("authorization", f"Bearer {KEY}"),)
            for make in (
                lambda **given: drain(inference.Generate(request, **given)),
                lambda **given: inference.ListModels(inference_pb2.ListModelsRequest(), **given),
                lambda **given: drain(reflect.ServerReflectionInfo(stream(), **given)),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await make()
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
                assert await make(metadata=metadata)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await unknown(b"")
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED

    keyed.call(walk())


def test_tenants_have_their_own_salt(keyed: Any) -> None:
    replica = keyed.replicas[0]
    replica.submits.clear()
    with keyed.client() as client:
        for key in (KEY, OTHER, KEY):
            headers = {"authorization": f"bearer {key}"}
            body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
            assert client.post("/v1/completions", json=body, headers=headers).status_code == 200
    first, second, third = (submit.tenant_salt for submit in replica.submits)
    assert first == third != second and len(first) == 16 and KEY.encode() not in first


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
def test_listening_beyond_this_machine_needs_keys(host: str) -> None:
    with pytest.raises(ExposureError, match="without API keys") as refused:
        check_exposure(host, AuthConfig())
    for remedy in ("--api-keys-file FILE", "HEADRACE_API_KEYS", "--host 127.0.0.1", "--allow-no-auth"):
        assert remedy in str(refused.value)
    check_exposure(host, AuthConfig(allow_no_auth=True))
    check_exposure(host, AuthConfig.model_validate({"keys": ["sk-12345678"]}))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.9.1", "[::1]"])
def test_loopback_is_open(host: str) -> None:
    check_exposure(host, AuthConfig())


def test_keys_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.touch(mode=0o600)
    path.write_text("# ours\nteam-a:sk-aaaaaaaa\n\nsk-bbbbbbbb\n")
    keys = AuthConfig(keys_file=path).load()
    assert [(entry.name, entry.key.get_secret_value()) for entry in keys] == [
        ("team-a", "sk-aaaaaaaa"),
        ("", "sk-bbbbbbbb"),
    ]
    assert "sk-aaaaaaaa" not in repr(keys)
    for text in ("", "short\n", "a b c d e f g h\n"):
        path.write_text(text)
        with pytest.raises(KeysFileError):
            AuthConfig(keys_file=path).load()
    with pytest.raises(KeysFileError):
        AuthConfig(keys_file=tmp_path / "missing").load()


def test_metrics_keys_come_from_a_file_and_are_no_api_keys(tmp_path: Path) -> None:
    path = tmp_path / "metrics-keys"
    path.touch(mode=0o600)
    path.write_text("prometheus:mk-aaaaaaaa\nnext:mk-bbbbbbbb\n")
    found = AuthConfig.model_validate({"metrics_key": "mk-cccccccc", "metrics_key_file": path}).load_metrics()
    assert [entry.key.get_secret_value() for entry in found] == ["mk-cccccccc", "mk-aaaaaaaa", "mk-bbbbbbbb"]
    assert AuthConfig().load_metrics() == ()
    for auth in ({"keys": ["mk-aaaaaaaa"], "metrics_key_file": path}, {"metrics_key_file": tmp_path / "missing"}):
        for load in (AuthConfig.load_all, KeyFiles):
            with pytest.raises(KeysFileError) as refused:
                load(AuthConfig.model_validate(auth))
            assert "mk-aaaaaaaa" not in str(refused.value)


@pytest.mark.parametrize("auth", [{"keys": ["sk-12345678"]}, {"metrics_key": "mk-12345678"}, {"allow_no_auth": True}])
def test_metrics_beyond_this_machine_need_a_key_or_an_explicit_exception(auth: Any) -> None:
    with pytest.raises(ExposureError, match="metrics"):
        check_metrics_exposure("0.0.0.0", AuthConfig(), no_auth=False)
    check_metrics_exposure("0.0.0.0", AuthConfig(), no_auth=True)
    check_metrics_exposure("127.0.0.1", AuthConfig(), no_auth=False)
    check_metrics_exposure("0.0.0.0", AuthConfig.model_validate(auth), no_auth=False)


def test_a_key_has_a_quota(harness: Any, make_replica: Any) -> None:
    import threading

    harness.start([make_replica(first_seconds=0.5)], auth={"keys": [KEY, OTHER]}, limits={"max_concurrent_per_key": 1})
    codes: dict[str, list[int]] = {KEY: [], OTHER: []}

    def post(key: str) -> None:
        with harness.client() as client:
            body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
            answer = client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
            codes[key].append(answer.status_code)
            assert answer.status_code == 200 or answer.headers["retry-after"]

    threads = [threading.Thread(target=post, args=(key,)) for key in (KEY, KEY, OTHER)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(codes[KEY]) == [200, 429] and codes[OTHER] == [200]


def test_a_changed_file_of_keys_is_used_without_a_restart(
    harness: Any, make_replica: Any, tmp_path: Path, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_files, "RELOAD_SECONDS", 0.02)
    path = tmp_path / "keys"
    path.touch(mode=0o600)
    path.write_text("old:the-old-key\n")
    harness.start([make_replica()], auth={"keys_file": path})

    def status(key: str) -> int:
        with harness.client(headers={"authorization": f"Bearer {key}"}) as client:
            return int(client.get("/v1/models").status_code)

    assert [status("the-old-key"), status("the-new-key")] == [200, 401]
    path.write_text("new:the-new-key\n")
    eventually(lambda: [status("the-old-key"), status("the-new-key")] == [401, 200])
    path.write_text("short\n")
    time.sleep(0.1)
    assert [status("the-old-key"), status("the-new-key")] == [401, 200], "what cannot be used changes nothing"
    path.unlink()
    time.sleep(0.1)
    assert [status("the-old-key"), status("the-new-key")] == [401, 200], "nor does a file that is missing"
    path.touch(mode=0o600)
    path.write_text("# all are revoked\n")
    eventually(lambda: status("the-new-key") == 401)
    with harness.client() as client:
        assert client.get("/v1/models").status_code == 401, "never open"
    path.write_text("new:the-new-key\n")
    eventually(lambda: status("the-new-key") == 200)


def _authenticator(path: Path, **auth: Any) -> tuple[KeyFiles, Authenticator]:
    watched = KeyFiles(AuthConfig.model_validate({"keys_file": path, **auth}))
    return watched, Authenticator(watched.current, bytes(32))


@pytest.fixture
def two_files(tmp_path: Path) -> tuple[Path, Path]:
    """One with two API keys, one with a metrics key."""
    keys, metrics = tmp_path / "keys", tmp_path / "metrics-keys"
    for path, text in ((keys, f"{KEY}\n{OTHER}\n"), (metrics, f"{METRICS_KEY}\n")):
        path.touch(mode=0o600)
        path.write_text(text)
    return keys, metrics


def test_when_the_last_metrics_key_is_revoked_api_keys_do_not_read_metrics(two_files: tuple[Path, Path]) -> None:
    keys, metrics = two_files
    watched, authenticator = _authenticator(keys, metrics_key_file=metrics)
    metrics.write_text("# all are revoked\n")
    assert watched.refresh()
    authenticator.use(watched.current)
    for key in (KEY, METRICS_KEY):
        assert not authenticator.may_read_metrics(f"Bearer {key}".encode())
    assert authenticator.tenant(f"Bearer {KEY}".encode()) is not None
