"""Several routers on one HTTP and one gRPC port, each with a separate address for metrics and health."""

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import SecretStr

from headrace_base.errors import ListenError
from headrace_router import router_server
from headrace_router.access.auth import ApiKey, AuthConfig
from headrace_router.api.listen import PortReservation, bind_http
from headrace_router.config import RouterConfig, StaticMember
from headrace_router.router_server import RouterServer
from support.members import secret_file

BODY = {"model": "tiny", "prompt": "x", "max_tokens": 3}
KEY = {"Authorization": "Bearer key-12345"}


def _reserve(port: int = 0) -> PortReservation:
    return PortReservation("127.0.0.1", port, "HTTP", "--port")


@pytest.fixture
def reserved() -> Iterator[tuple[PortReservation, PortReservation]]:
    pair = _reserve(), _reserve()
    yield pair
    for reservation in pair:
        reservation.close()


@pytest.fixture
def start(
    harness: Any, make_replica: Any, reserved: tuple[PortReservation, PortReservation]
) -> Iterator[Callable[..., Any]]:
    """start(...): one more router on the reserved ports, with its own replica: a fake replica supports one router."""
    routers: list[RouterServer] = []

    def make(*, token_seconds: float = 0.0, **config: Any) -> RouterServer:
        replica = make_replica(token_seconds=token_seconds)
        harness.replicas.append(replica)
        harness.call(replica.start())
        given = {
            "port": reserved[0].port,
            "grpc_port": reserved[1].port,
            "share_port": True,
            "metrics_port": 0,
            "secret_file": secret_file(),
            "members": (StaticMember(address=replica.address, replica_id="r0"),),
            "auth": AuthConfig(keys=(ApiKey(name="me", key=SecretStr("key-12345")),)),
            "shutdown_seconds": 1.0,
            **config,
        }

        async def started() -> RouterServer:
            router = RouterServer(RouterConfig(**given))
            await router.start()
            return router

        routers.append(harness.call(started()))
        return routers[-1]

    yield make
    for router in routers:
        harness.call(router.stop())


def _answered(router: RouterServer) -> float:
    """Requests that this router answered, read at its own address."""
    text = httpx.get(f"http://{router.info().metrics}/metrics", headers=KEY, trust_env=False).text
    lines = [line for line in text.splitlines() if line.startswith("vllm:request_success_total{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_only_routers_can_bind_a_reserved_port() -> None:
    reservation = _reserve()
    with pytest.raises(ListenError, match="--port"):
        _reserve(reservation.port)
    with pytest.raises(ListenError):
        bind_http("127.0.0.1", reservation.port)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", reservation.port), 1)
    members = [bind_http("127.0.0.1", reservation.port, shared=True) for _ in range(2)]
    with pytest.raises(ListenError):
        _reserve(reservation.port)
    for member in members:
        member.close()
    bind_http("127.0.0.1", reservation.port, shared=True).close()
    reservation.close()
    bind_http("127.0.0.1", reservation.port).close()


def test_both_get_connections_and_one_is_enough(harness: Any, start: Callable[..., RouterServer]) -> None:
    pair = start(), start()
    url = f"http://127.0.0.1:{pair[0].http_port}"
    assert pair[0].info().http == pair[1].info().http and pair[0].info().grpc == pair[1].info().grpc
    assert len({router.info().metrics for router in pair} | {pair[0].info().http}) == 3

    def ask() -> int:
        return httpx.post(f"{url}/v1/completions", json=BODY, headers=KEY, trust_env=False).status_code

    for _ in range(24):  # a connection each; the chance that one router gets none of 24 is 1 in 8 million
        assert ask() == 200
    counts = [_answered(router) for router in pair]
    assert sum(counts) == 24 and min(counts) > 0
    for _ in range(8):
        with grpc.insecure_channel(pair[0].info().grpc, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            status = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5).status
            assert status == health_pb2.HealthCheckResponse.SERVING
    harness.call(pair[0].stop())
    for _ in range(8):
        assert ask() == 200


def test_a_router_that_leaves_fails_no_request_while_another_one_serves(
    harness: Any, start: Callable[..., RouterServer]
) -> None:
    """It gives up its share of the port, serves what comes on open connections, and ends these one by one."""
    slow, fresh = {"max_tokens": 200}, httpx.Limits(max_keepalive_connections=0)
    kept_open = httpx.Limits(keepalive_expiry=None)  # httpx's own 5 seconds can pass before the test is at the stream
    pair = start(shutdown_seconds=60.0, token_seconds=0.1), start()
    url = f"http://127.0.0.1:{pair[0].http_port}/v1/completions"

    def clients_of(leaving: RouterServer, count: int) -> list[httpx.Client]:
        """Kept connections to this router."""
        found: list[httpx.Client] = []
        while len(found) < count:
            before, own = sum(map(_answered, pair)), _answered(leaving)
            client = httpx.Client(headers=KEY, trust_env=False, timeout=60, limits=kept_open)
            assert client.post(url, json=BODY).status_code == 200
            while sum(map(_answered, pair)) == before:  # it counts an answer after the client has it
                time.sleep(0.01)
            if _answered(leaving) > own:
                found.append(client)
        return found

    streaming, *kept = clients_of(pair[0], 4)
    with ThreadPoolExecutor() as pool:
        stream = pool.submit(lambda: streaming.post(url, json=BODY | slow).text)
        while not pair[0].services.admission.running:
            time.sleep(0.01)
        stopped = asyncio.run_coroutine_threadsafe(pair[0].stop(), harness.loop)
        while not pair[0].services.admission.leaving:
            time.sleep(0.01)
        first = [client.post(url, json=BODY) for client in kept]
        assert [(answer.status_code, answer.headers["connection"]) for answer in first] == [(200, "close")] * 3
        served = _answered(pair[1])
        with httpx.Client(headers=KEY, trust_env=False, limits=fresh) as client:
            assert {client.post(url, json=BODY).status_code for _ in range(30)} == {200}
        assert [client.post(url, json=BODY).status_code for client in kept] == [200] * 3, "over new connections"
        assert _answered(pair[1]) == served + 33
        assert not stopped.done() and httpx.get(f"http://{pair[0].info().metrics}/health/ready").status_code == 503
        assert '"finish_reason":"stop"' in stream.result(60)
        stopped.result(30)
    for client in (streaming, *kept):
        client.close()


def test_the_own_address_has_metrics_and_health_with_the_same_keys(start: Callable[..., RouterServer]) -> None:
    with httpx.Client(base_url=f"http://{start().info().metrics}", trust_env=False) as client:
        assert client.get("/metrics").status_code == 401
        assert client.get("/metrics", headers=KEY).text.startswith("#")
        assert client.get("/health/ready").status_code == 200
        for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/version")):
            assert client.request(method, path, headers=KEY).status_code == 404
            assert client.request(method, path).status_code == 401


def test_the_own_address_can_be_open(start: Callable[..., RouterServer]) -> None:
    router = start(metrics_host="127.0.0.2", metrics_no_auth=True)
    own = router.info().metrics
    assert own.startswith("127.0.0.2:") and router.info().http.startswith("127.0.0.1:")
    with httpx.Client(base_url=f"http://{own}", trust_env=False) as client:
        assert client.get("/metrics").text.startswith("#")
        assert client.get("/v1/models").status_code == 401
    with httpx.Client(base_url=f"http://{router.info().http}", trust_env=False) as client:
        assert client.get("/metrics").status_code == 401, "the API's port still needs a key"


def test_a_router_accepts_connections_when_it_can_answer(
    start: Callable[..., RouterServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before that, it would refuse requests that another router on the same port could answer."""
    opened: list[bool] = []

    def bind(host: str, port: int, *, shared: bool = False, **options: Any) -> socket.socket:
        if shared:
            opened.append(bool(router_ready()))
        return bind_http(host, port, shared=shared, **options)

    ready: list[RouterServer] = []
    original = RouterServer.__init__

    def record(self: RouterServer, config: RouterConfig) -> None:
        original(self, config)
        ready.append(self)

    def router_ready() -> bool:
        return ready[-1].services.ready

    monkeypatch.setattr(router_server, "bind_http", bind)
    monkeypatch.setattr(RouterServer, "__init__", record)
    start()
    assert opened == [True]
    monkeypatch.setattr(router_server, "JOIN_SECONDS", 0.3)
    empty = start(members=())  # it has no replica to wait for, and reports that it is not ready
    assert opened == [True, False]
    answer = httpx.get(f"http://{empty.info().metrics}/health/ready", trust_env=False)
    assert answer.status_code == 503
