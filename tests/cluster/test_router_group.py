"""Several routers of one serve: their configs, the ports that they share, and their addresses."""

import io
import socket
import subprocess
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_cluster.core.view import RouterPlace
from headrace_cluster.errors import RouterFailedError
from headrace_cluster.launch import routers as router_process
from headrace_cluster.launch.routers import RouterGroup
from headrace_cluster.spec.cluster_spec import parse_spec
from headrace_proto.errors import ListenError
from headrace_router.config import RouterConfig
from support.members import secret_file


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[RouterConfig]:
    """The configs of the processes that would have been started."""
    configs: list[RouterConfig] = []

    def encode(config: RouterConfig) -> str:
        configs.append(config)
        return ""

    monkeypatch.setattr(router_process, "encode_config", encode)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: SimpleNamespace(stdin=io.BytesIO(), poll=lambda: 0))
    return configs


@pytest.fixture
def make() -> Iterator[Callable[..., RouterGroup]]:
    groups: list[RouterGroup] = []

    def made(**routers: Any) -> RouterGroup:
        groups.append(RouterGroup(parse_spec({"routers": routers}), "127.0.0.1:1", secret_file()))
        return groups[-1]

    yield made
    for group in groups:
        group.stop()


def _place(config: RouterConfig, metrics: int) -> RouterPlace:
    return RouterPlace(
        config.router_id,
        1,
        f"127.0.0.1:{config.port}",
        f"127.0.0.1:{config.grpc_port}",
        f"127.0.0.1:{metrics or config.port}",
    )


def test_one_router_shares_nothing(make: Callable[..., RouterGroup], started: list[RouterConfig]) -> None:
    make(port=0, grpc_port=0).start()
    (config,) = started
    assert (config.port, config.grpc_port, config.share_port, config.metrics_port) == (0, 0, False, None)


def test_one_router_may_have_a_metrics_address_of_its_own(
    make: Callable[..., RouterGroup], started: list[RouterConfig]
) -> None:
    make(port=0, grpc_port=0, metrics_port=9105, metrics_host="127.0.0.2").start()
    make(port=0, grpc_port=0, host="0.0.0.0", metrics_no_auth=True).start()
    found = [(config.metrics_host, config.metrics_port, config.metrics_no_auth) for config in started]
    assert found == [("127.0.0.2", 9105, False), ("127.0.0.1", 8003, True)], "loopback by default without a key"


def test_several_routers_share_one_port_and_have_own_metrics_ports(
    make: Callable[..., RouterGroup], started: list[RouterConfig]
) -> None:
    make(count=3, port=0, grpc_port=0, metrics_port=9001).start()
    assert len({(config.port, config.grpc_port) for config in started}) == 1
    assert started[0].port not in (0, started[0].grpc_port) and all(config.share_port for config in started)
    assert [config.metrics_port for config in started] == [9001, 9002, 9003]
    assert len({config.router_id for config in started}) == 3


def test_the_ports_are_reserved_while_no_router_runs(
    make: Callable[..., RouterGroup], started: list[RouterConfig]
) -> None:
    group = make(count=2, port=0, grpc_port=0)
    group.start()
    for port in (started[0].port, started[0].grpc_port):
        with socket.socket() as foreign, pytest.raises(OSError, match="in use"):
            foreign.bind(("127.0.0.1", port or 0))
    with pytest.raises(ListenError, match=rf"{started[0].port} for HTTP.*--port"):
        make(count=2, port=started[0].port, grpc_port=0)
    with pytest.raises(ListenError, match=r"for gRPC.*--grpc-port"):
        make(count=2, port=0, grpc_port=started[0].grpc_port)
    group.stop()
    with socket.socket() as foreign:
        foreign.bind(("127.0.0.1", started[0].port))


def test_addresses_are_known_once_all_are_listed(make: Callable[..., RouterGroup], started: list[RouterConfig]) -> None:
    group = make(count=2, port=0, grpc_port=0)
    group.start()
    other = RouterPlace("router-x", 1, "10.0.0.1:8000", "", "10.0.0.1:8000")  # a `headrace router` on another machine
    first, second = (_place(config, 9001 + index) for index, config in enumerate(started))
    assert group.places([other, second]) == [] and not group.ready([])
    assert group.places([second, other, first]) == [first, second]
    group.start()  # simulates a restart of both: they use the same ports
    assert [config.metrics_port for config in started[2:]] == [9001, 9002]
    assert len({config.router_id for config in started}) == 4, "each start is another router"
    assert group.places([first, second]) == []


def test_a_router_that_was_listed_is_restarted_and_one_that_never_was_is_an_error(
    make: Callable[..., RouterGroup], started: list[RouterConfig]
) -> None:
    """Unless clients have requests in flight, which the error would end."""
    group = make(count=2, port=0, grpc_port=0)
    group.start()
    assert group.places([_place(started[0], 9001)]) == []
    with pytest.raises(RouterFailedError, match="router 2 of 2 ended"):
        group.watch()
    events = group.watch(serving=True)
    assert [event.partition(" ended")[0] for event in events] == ["router 2 of 2"], "the other one is restarted already"
    group = make(count=2, port=0, grpc_port=0)
    group.start()
    group.places([_place(config, 9001 + index) for index, config in enumerate(started[2:])])
    assert [event.partition(" ended")[0] for event in group.watch()] == ["router 1 of 2", "router 2 of 2"]


def test_an_invalid_address_is_an_error(make: Callable[..., RouterGroup], started: list[RouterConfig]) -> None:
    group = make(port=0, grpc_port=0)
    group.start()
    with pytest.raises(RouterFailedError, match="'nowhere'"):
        group.places([RouterPlace(started[0].router_id, 1, "nowhere", "", "nowhere")])
