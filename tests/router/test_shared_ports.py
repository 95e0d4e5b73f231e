"""Several routers on one HTTP and one gRPC port, each with an address of its own for metrics and health."""

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace_proto.errors import ListenError
from headrace_router import server
from headrace_router.auth import ApiKey, AuthConfig
from headrace_router.config import RouterConfig, StaticMember
from headrace_router.listen import bind_http
from headrace_router.port_guard import PortGuard
from headrace_router.server import RouterServer

SECRET = b"s" * 32
BODY = {"model": "tiny", "prompt": "x", "max_tokens": 3}
KEY = {"Authorization": "Bearer key-12345"}


def _guard(port: int = 0) -> PortGuard:
    return PortGuard("127.0.0.1", port, "HTTP", "--port")


@pytest.fixture
def guards() -> Iterator[tuple[PortGuard, PortGuard]]:
    pair = _guard(), _guard()
    yield pair
    for guard in pair:
        guard.close()


@pytest.fixture
def start(harness: Any, make_replica: Any, guards: tuple[PortGuard, PortGuard]) -> Iterator[Callable[..., Any]]:
    """start(...): one more router on the guarded ports, with a replica of its own: the fake one knows one router."""
    routers: list[RouterServer] = []

    def make(**config: Any) -> RouterServer:
        replica = make_replica()
        harness.replicas.append(replica)
        harness.call(replica.start())
        given = {
            "port": guards[0].port,
            "grpc_port": guards[1].port,
            "share_port": True,
            "metrics_port": 0,
            "secret": SECRET,
            "members": (StaticMember(address=replica.address, replica_id="r0"),),
            "auth": AuthConfig(keys=(ApiKey(name="me", key="key-12345"),)),
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
    """Requests that this router answered, read where only this one is read."""
    text = httpx.get(f"http://{router.info().metrics}/metrics", headers=KEY, trust_env=False).text
    lines = [line for line in text.splitlines() if line.startswith("vllm:request_success_total{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_a_guarded_port_is_for_routers_alone() -> None:
    guard = _guard()
    with pytest.raises(ListenError, match="--port"):
        _guard(guard.port)
    with pytest.raises(ListenError):
        bind_http("127.0.0.1", guard.port)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", guard.port), 1)
    members = [bind_http("127.0.0.1", guard.port, shared=True) for _ in range(2)]
    with pytest.raises(ListenError):
        _guard(guard.port)
    for member in members:
        member.close()
    bind_http("127.0.0.1", guard.port, shared=True).close()
    guard.close()
    bind_http("127.0.0.1", guard.port).close()


def test_a_port_in_use_is_not_guarded() -> None:
    with socket.socket() as foreign:
        # A server that would share its port with anybody of the same user is in the way, too.
        foreign.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        foreign.bind(("127.0.0.1", 0))
        foreign.listen()
        with pytest.raises(ListenError, match="choose another with --port"):
            _guard(foreign.getsockname()[1])


def test_both_get_connections_and_one_is_enough(harness: Any, start: Callable[..., RouterServer]) -> None:
    pair = start(), start()
    url = f"http://127.0.0.1:{pair[0].http_port}"
    assert pair[0].info().http == pair[1].info().http and pair[0].info().grpc == pair[1].info().grpc
    assert len({router.info().metrics for router in pair} | {pair[0].info().http}) == 3

    def ask() -> int:
        return httpx.post(f"{url}/v1/completions", json=BODY, headers=KEY, trust_env=False).status_code

    for _ in range(24):  # a connection each; that one gets none of 24 comes once in 8 million runs
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


def test_the_own_address_has_metrics_and_health_behind_the_guard(start: Callable[..., RouterServer]) -> None:
    with httpx.Client(base_url=f"http://{start().info().metrics}", trust_env=False) as client:
        assert client.get("/metrics").status_code == 401
        assert client.get("/metrics", headers=KEY).text.startswith("#")
        assert client.get("/health/ready").status_code == 200
        for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/docs")):
            assert client.request(method, path, headers=KEY).status_code == 404
            assert client.request(method, path).status_code == 401


def test_a_router_takes_connections_when_it_can_answer(
    start: Callable[..., RouterServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a router that serves, one that knows no replica yet would refuse what the other answers."""
    opened: list[bool] = []

    def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
        if shared:
            opened.append(bool(router_ready()))
        return bind_http(host, port, shared=shared)

    ready: list[RouterServer] = []
    original = RouterServer.__init__

    def remember(self: RouterServer, config: RouterConfig) -> None:
        original(self, config)
        ready.append(self)

    def router_ready() -> bool:
        return ready[-1].services.ready

    monkeypatch.setattr(server, "bind_http", bind)
    monkeypatch.setattr(RouterServer, "__init__", remember)
    start()
    assert opened == [True]
    monkeypatch.setattr(server, "JOIN_SECONDS", 0.3)
    before = time.monotonic()
    lonely = start(members=())  # nobody to wait for: it says so itself
    assert opened == [True, False] and time.monotonic() - before >= 0.3
    answer = httpx.get(f"http://{lonely.info().metrics}/health/ready", trust_env=False)
    assert answer.status_code == 503


def test_shared_ports_are_given_by_number() -> None:
    with pytest.raises(ValueError, match="by number"):
        RouterConfig(secret=SECRET, share_port=True, port=0)
