"""The router as a child: its config, its restarts, its end."""

import errno
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from headrace_cluster.errors import RouterFailedError
from headrace_cluster.launch.routers import (
    RouterProcess,
    decode_config,
    encode_config,
    router_config,
)
from headrace_cluster.local.ports import is_taken
from headrace_cluster.spec.cluster_spec import parse_spec
from headrace_router.config import RouterConfig
from support.members import secret_file


@pytest.fixture
def configure(tmp_path: Path) -> Callable[..., RouterConfig]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    auth = {"keys": [{"name": "me", "key": "key-12345"}], "metrics_key": "mk-123456"}
    spec = parse_spec({"routers": {"port": port, "grpc_port": 0}, "auth": auth})
    return partial(router_config, spec, "127.0.0.1:1", secret_file(), log_folder=tmp_path / "run")


@pytest.fixture
def config(configure: Callable[..., RouterConfig]) -> RouterConfig:
    return configure()


@pytest.fixture
def router(configure: Callable[..., RouterConfig]) -> Iterator[RouterProcess]:
    process = RouterProcess(configure)
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


def test_a_config_is_equal_after_the_pipe(config: RouterConfig) -> None:
    back = decode_config(encode_config(config))
    assert back == config
    assert "key-12345" not in repr(back) and "mk-123456" not in repr(back)
    assert back.auth.metrics_key is not None and back.auth.metrics_key.key.get_secret_value() == "mk-123456"


def test_a_router_that_dies_is_restarted_and_stops_in_order(
    config: RouterConfig,
    router: RouterProcess,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "uvicorn.py").write_text("raise SystemExit('a module of the folder in which it was started')")
    router.start()
    _until_listening(config.port)
    assert router.watch() == ""
    router.note_listed(config.port, 0)
    first = router.pid
    assert first is not None
    command = Path(f"/proc/{first}/cmdline").read_bytes()
    assert b"key-12345" not in command and os.getsid(first) == first
    os.kill(first, signal.SIGKILL)
    message = ""
    deadline = time.monotonic() + 5
    while not message and time.monotonic() < deadline:
        message = router.watch()
        time.sleep(0.02)
    assert "killed by signal 9" in message and "starting it again" in message
    while router.pid == first:
        assert router.watch() == ""
        time.sleep(0.02)
    _until_listening(config.port)
    router.terminate()
    deadline = time.monotonic() + 10
    while router.running:
        assert time.monotonic() < deadline, "the router does not end"
        time.sleep(0.02)
    assert not is_taken("127.0.0.1", config.port, "--port")
    written = (tmp_path / "run" / "router.log").read_text()
    assert written.count(" router starts (") == 2 and written.rstrip().endswith(" router has stopped")
    assert "listening" not in capfd.readouterr().err, "the terminal gets warnings"


def test_a_start_that_fails_is_repeated(router: RouterProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """For lack of memory or processes: an exception would end `serve`, and with it every replica."""
    router.start()
    router.note_listed(0, 0)
    first = router.pid
    router.kill()
    assert "starting it again" in router.watch()

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", fail)
        message = ""
        while not message:
            message = router.watch()
            time.sleep(0.02)
    assert "could not be started" in message and "trying again in 1 s" in message
    deadline = time.monotonic() + 20
    while router.pid == first:
        assert router.watch() == "" and time.monotonic() < deadline
        time.sleep(0.02)


def test_a_router_that_cannot_listen_is_a_failure(config: RouterConfig, router: RouterProcess) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", config.port))
        taken.listen()
        router.start()
        with pytest.raises(RouterFailedError, match=r"the router ended .*; its log: .*/run/router\.log"):
            for _ in range(400):
                assert router.watch() == ""
                time.sleep(0.05)


def test_the_setting_of_unknown_fields_reaches_the_router() -> None:
    spec = parse_spec({"routers": {"unknown_fields": "ignore"}})
    assert router_config(spec, "127.0.0.1:1", secret_file()).unknown_fields == "ignore"
