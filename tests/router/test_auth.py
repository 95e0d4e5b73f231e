"""A walk over every route and RPC without a key; exposure; tenants."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from headrace_proto import inference_pb2, inference_pb2_grpc
from headrace_router.auth import AuthConfig, Authenticator, ExposureError, KeysFileError, check_exposure

KEY, OTHER = "sk-first-key-1", "sk-second-key-2"
KEYLESS = {"/health", "/health/live", "/health/ready"}


@pytest.fixture(scope="module")
def guarded(tokenizer: Any) -> Any:
    from tests.router.conftest import FakeReplica, Harness

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

    from headrace_router.http.generate_routes import generate_routes
    from headrace_router.http.info_routes import info_routes, vital_routes

    services = harness.router.services
    return [
        route
        for part in (generate_routes(services), vital_routes(services), info_routes(services, FastAPI()))
        for route in part.routes
    ]


def test_every_route_needs_a_key_but_health(guarded: Any) -> None:
    paths = _paths(guarded)
    assert len(paths) >= 12
    with guarded.client() as client:
        for method, path in [*paths, ("GET", "/nowhere"), ("OPTIONS", "/v1/models"), ("GET", "/health/../metrics")]:
            answer = client.request(method, path)
            if path in KEYLESS:
                assert answer.status_code == 200
                continue
            assert answer.status_code == 401, (method, path)
            assert answer.headers["www-authenticate"] == "Bearer"
            if method != "HEAD":
                assert answer.json()["error"]["code"] == "invalid_api_key"
            for header in ("Bearer wrong-key-123", f"Basic {KEY}", KEY, f"Bearer {KEY}x", "Bearer"):
                assert client.request(method, path, headers={"authorization": header}).status_code == 401
            assert client.request(method, path, headers={"authorization": f"Bearer {KEY}"}).status_code != 401


@pytest.mark.parametrize("path", ["/%68ealth/../metrics", "//health", "/health/", "/health%2f..%2fmetrics", "/Health"])
def test_only_the_exact_raw_path_is_keyless(guarded: Any, path: str) -> None:
    import socket

    with socket.create_connection(("127.0.0.1", guarded.router.http_port), 5) as sock:
        sock.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        assert sock.recv(100).startswith(b"HTTP/1.1 401")


def test_every_rpc_needs_a_key_but_health(guarded: Any) -> None:
    async def walk() -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{guarded.router.grpc_port}") as channel:
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

            unknown = channel.unary_unary("/headrace.v1.Inference/Nothing")
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

    guarded.call(walk())


def test_tenants_have_their_own_salt(guarded: Any) -> None:
    replica = guarded.replicas[0]
    replica.submits.clear()
    with guarded.client() as client:
        for key in (KEY, OTHER, KEY):
            headers = {"authorization": f"bearer {key}"}
            body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
            assert client.post("/v1/completions", json=body, headers=headers).status_code == 200
    first, second, third = (submit.tenant_salt for submit in replica.submits)
    assert first == third != second and len(first) == 16 and KEY.encode() not in first


def test_without_keys_the_salt_is_empty() -> None:
    tenant = Authenticator((), b"s").tenant(None)
    assert tenant is not None and tenant.salt == b""


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
def test_listening_beyond_this_machine_needs_keys(host: str) -> None:
    with pytest.raises(ExposureError, match="without API keys"):
        check_exposure(host, AuthConfig())
    check_exposure(host, AuthConfig(allow_no_auth=True))
    check_exposure(host, AuthConfig.model_validate({"keys": ["sk-12345678"]}))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.9.1", "[::1]"])
def test_loopback_is_open(host: str) -> None:
    check_exposure(host, AuthConfig())


def test_keys_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
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
