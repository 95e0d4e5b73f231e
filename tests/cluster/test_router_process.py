"""The router as a child: its config, its restarts, its end."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace_cluster.errors import RouterFailedError
from headrace_cluster.ports import check_free
from headrace_cluster.router_process import RouterProcess, decode_config, encode_config, router_config
from headrace_cluster.spec import parse_spec
from headrace_router.config import RouterConfig


@pytest.fixture
def config() -> RouterConfig:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    auth = {"keys": [{"name": "me", "key": "key-12345"}]}
    spec = parse_spec({"routers": {"port": port, "grpc_port": 0}, "auth": auth})
    return router_config(spec, "127.0.0.1:1", bytes(range(1, 200)))


@pytest.fixture
def router(config: RouterConfig) -> Iterator[RouterProcess]:
    process = RouterProcess(config)
    yield process
    process.kill()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _until_listening(port: int) -> None:
    deadline = time.monotonic() + 20
    while not _listens(port):
        assert time.monotonic() < deadline, "the router does not listen"
        time.sleep(0.05)


def test_a_config_crosses_the_pipe_whole(config: RouterConfig) -> None:
    back = decode_config(encode_config(config))
    assert back == config
    assert back.secret.get_secret_value() == bytes(range(1, 200))
    assert "key-12345" not in repr(back)


def test_a_router_that_dies_comes_back_and_stops_in_order(config: RouterConfig, router: RouterProcess) -> None:
    router.start()
    _until_listening(config.port)
    assert router.watch(may_restart=True) == ""
    first = router.pid
    assert first is not None
    command = Path(f"/proc/{first}/cmdline").read_bytes()
    assert b"key-12345" not in command and os.getsid(first) == first
    os.kill(first, signal.SIGKILL)
    said = ""
    deadline = time.monotonic() + 5
    while not said and time.monotonic() < deadline:
        said = router.watch(may_restart=True)
        time.sleep(0.02)
    assert said == "the router ended (killed by signal 9); starting it again in 0.2 s"
    while router.pid == first:
        assert router.watch(may_restart=True) == ""
        time.sleep(0.02)
    _until_listening(config.port)
    router.stop()
    check_free("127.0.0.1", config.port, "--port")


def test_a_router_that_cannot_listen_is_a_failure(config: RouterConfig, router: RouterProcess) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", config.port))
        taken.listen()
        router.start()
        with pytest.raises(RouterFailedError, match="the router ended"):
            for _ in range(400):
                assert router.watch(may_restart=False) == ""
                time.sleep(0.05)
