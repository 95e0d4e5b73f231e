"""Controller and routers as children of `serve`: configs, shared ports, restarts, and children that hang."""

import errno
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from headrace_base.errors import ListenError
from headrace_cluster.core.view import ClusterView, ControllerConfig, RouterAddresses
from headrace_cluster.errors import ChildFailedError
from headrace_cluster.launch import routers as routers_module
from headrace_cluster.launch.child_process import BACKOFF
from headrace_cluster.launch.controller_process import START_SECONDS, VIEW_SECONDS, ControllerProcess
from headrace_cluster.launch.routers import RouterGroup, encode_config, router_config
from headrace_cluster.spec.cluster_spec import parse_spec
from headrace_router.config import RouterConfig
from support.members import secret_file

VIEW = ClusterView(
    ready=True, fatal="", stop_requested=False, progress=[], started={}, roles={}, routers=[], failures={}
)
AUTH = {"keys": [{"name": "me", "key": "key-12345"}], "metrics_key": "mk-123456"}


class _Child:
    """In place of a process."""

    def __init__(self, *_: object, **__: object) -> None:
        self.code: int | None = None
        self.pid = id(self)
        self.stdin = open(os.devnull, "wb")  # noqa: SIM115 - the caller closes it
        self.stdout: list[bytes] = []

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.code = -9

    def wait(self) -> int | None:
        return self.code

    def send_signal(self, number: int) -> None:
        self.code = -number


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[_Child]:
    """Those that would have been started."""
    started: list[_Child] = []

    def popen(*_: object, **__: object) -> _Child:
        started.append(_Child())
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    return started


# -- routers ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch, children: list[_Child]) -> list[RouterConfig]:
    """Those of the routers that would have been started."""
    found: list[RouterConfig] = []

    def encode(config: RouterConfig) -> bytes:
        found.append(config)
        return b""

    monkeypatch.setattr(routers_module, "encode_config", encode)
    return found


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., RouterGroup]]:
    groups: list[RouterGroup] = []

    def started(auth: Any = None, **routers: Any) -> RouterGroup:
        spec = parse_spec({"routers": {"port": 0, "grpc_port": 0} | routers, "auth": auth or {}})
        groups.append(RouterGroup(spec))
        groups[-1].start("127.0.0.1:1", secret_file(), tmp_path / "run")
        return groups[-1]

    yield started
    for group in groups:
        group.stop()


def _place(config: RouterConfig) -> RouterAddresses:
    http, grpc = f"127.0.0.1:{config.port}", f"127.0.0.1:{config.grpc_port}"
    return RouterAddresses(config.router_id, 1, http, grpc, http)


def test_a_config_is_equal_after_the_pipe() -> None:
    spec = parse_spec({"routers": {"unknown_fields": "ignore"}, "auth": AUTH})
    config = router_config(spec, "127.0.0.1:1", secret_file())
    back = RouterConfig.model_validate_json(encode_config(config))
    assert back == config and back.unknown_fields == "ignore"
    assert "key-12345" not in repr(back) and "mk-123456" not in repr(back)
    assert back.auth.metrics_key is not None and back.auth.metrics_key.key.get_secret_value() == "mk-123456"


def test_one_router_shares_nothing(start: Callable[..., RouterGroup], configs: list[RouterConfig]) -> None:
    group = start()
    start(metrics_port=9105, metrics_host="127.0.0.2")
    start(host="0.0.0.0", metrics_no_auth=True)
    assert (configs[0].port, configs[0].grpc_port, configs[0].share_port) == (group.http_port, group.grpc_port, False)
    assert 0 not in (group.http_port, group.grpc_port)
    found = [(config.metrics_host, config.metrics_port, config.metrics_no_auth) for config in configs]
    assert found[0][1] is None and found[1] == ("127.0.0.2", 9105, False)
    assert found[2] == ("127.0.0.1", 8003, True), "loopback by default without a key"


def test_several_routers_share_ports_which_are_reserved_while_none_runs(
    start: Callable[..., RouterGroup], configs: list[RouterConfig]
) -> None:
    group = start(count=3, metrics_port=9001)
    assert {(config.port, config.grpc_port) for config in configs} == {(group.http_port, group.grpc_port)}
    assert all(config.share_port for config in configs)
    assert [config.metrics_port for config in configs] == [9001, 9002, 9003]
    assert len({config.router_id for config in configs}) == 3
    for port in (group.http_port, group.grpc_port):
        with socket.socket() as foreign, pytest.raises(OSError, match="in use"):
            foreign.bind(("127.0.0.1", port))
    for count in (1, 2):
        with pytest.raises(ListenError, match=rf"{group.http_port} for HTTP.*in use.*--port"):
            start(count=count, port=group.http_port)
        with pytest.raises(ListenError, match=r"for gRPC.*in use.*--grpc-port"):
            start(count=count, grpc_port=group.grpc_port)
    group.stop()
    with socket.socket() as foreign:
        foreign.bind(("127.0.0.1", group.http_port))


def test_a_router_that_was_listed_is_restarted_and_one_that_never_was_is_an_error(
    start: Callable[..., RouterGroup], configs: list[RouterConfig], children: list[_Child]
) -> None:
    """Unless clients have requests in flight, which the error would end."""
    group = start(count=2)
    other = RouterAddresses("router-x", 1, "10.0.0.1:8000", "", "10.0.0.1:8000")  # a `headrace router` elsewhere
    first, second = map(_place, configs)
    assert group.places([other, first]) == [] and not group.ready([other, first])
    children[0].code = -9
    assert group.watch() == ["router 1 of 2 ended (killed by signal 9); starting another one now"]
    children[1].code = 1
    with pytest.raises(ChildFailedError, match=r"router 2 of 2 ended \(exit status 1\); its log: .*/run/router-2\.log"):
        group.watch()
    assert len(children) == len(configs) == 3 and configs[2].router_id != configs[0].router_id
    assert configs[2].port == configs[0].port
    assert group.places([second, other, _place(configs[2])]) == [_place(configs[2]), second]
    (event,) = group.watch(serving=True)
    assert event.startswith("router 2 of 2 ended")


def test_a_start_that_fails_is_repeated(
    start: Callable[..., RouterGroup],
    configs: list[RouterConfig],
    children: list[_Child],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For lack of memory or processes: an exception would end `serve`, and with it every replica."""
    group = start()
    group.places([_place(configs[0])])
    children[0].code = -9
    group.watch()

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    now = time.monotonic()
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", fail)
        (event,) = group.watch()
    assert "could not be started ([Errno 12] Cannot allocate memory); starting another one in 1 s" in event
    monkeypatch.setattr(time, "monotonic", lambda: now + 2)
    assert group.watch() == [] and len(children) == 2


# -- the controller --------------------------------------------------------------------------------------------------


class _Bench:
    """A controller that answers, ends or hangs. The clock is a number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, children: list[_Child]) -> None:
        self.now = 100.0
        self.starts: list[float] = []
        self.answers = True
        self.children = children
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr("random.random", lambda: 0.0)
        self.process = ControllerProcess(parse_spec({"admin": {"port": 0}, "control": {"port": 0}}), "127.0.0.1")
        self.process.start(ControllerConfig(spec="{}", admin_key="k", secret_file="s", log_folder="/logs"))

    def wait(self, seconds: float) -> list[str]:
        """What was shown, with two polls per second."""
        shown = []
        for _ in range(int(seconds * 2)):
            self.process._view = VIEW if self.answers else None
            shown.append(self.process.poll()[1])
            self.now += 0.5
        return [event for event in shown if event]

    def end(self, code: int) -> None:
        self.children[-1].code = code


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, children: list[_Child]) -> Iterator[_Bench]:
    made = _Bench(monkeypatch, children)
    yield made
    made.process.__exit__()


def test_one_that_was_never_up_ends_the_start_with_its_log(bench: _Bench) -> None:
    bench.end(1)
    with pytest.raises(ChildFailedError, match=r"ended \(exit status 1\); its log: /logs/controller.log"):
        bench.process.poll()


def test_losses_never_end_and_pauses_grow(bench: _Bench) -> None:
    assert bench.wait(100) == [] and len(bench.children) == 1
    bench.end(-9)
    assert bench.wait(2) == ["the controller ended (killed by signal 9); starting another one now"]
    starts: list[float] = []
    for _ in range(600):
        if len(bench.children) > len(starts):
            starts.append(bench.now)
        bench.end(-9)
        bench.wait(0.5)
    pauses = [after - before for before, after in pairwise(starts[2:])]
    assert pauses[:4] == sorted(pauses[:4]) and min(pauses[5:]) > 5 and max(pauses) <= BACKOFF.limit + 1


def test_one_that_hangs_is_killed(bench: _Bench) -> None:
    bench.wait(2)
    bench.answers = False
    assert bench.wait(VIEW_SECONDS - 1) == []
    assert bench.wait(2) == ["the controller does not answer; starting another one now"]
    assert len(bench.children) == 2 and bench.children[0].code == -9
    assert bench.wait(START_SECONDS - 2) == [], "the next one loads its libraries first"
    bench.answers = True
    assert bench.wait(1) == [] and bench.process.poll()[0] is None


def test_the_next_one_has_the_same_ports(bench: _Bench) -> None:
    assert bench.process.spec.admin.port == bench.process.admin_port > 0
    assert bench.process.control_address == f"127.0.0.1:{bench.process.spec.control.port}"
