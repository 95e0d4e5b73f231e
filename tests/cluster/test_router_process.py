"""A router as a child of `serve`, as a process: its restart and its end."""

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from headrace_cluster.launch.routers import RouterGroup
from headrace_cluster.spec.cluster_spec import parse_spec
from support.members import secret_file


def test_a_router_that_dies_is_restarted_and_stops_in_order(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "uvicorn.py").write_text("raise SystemExit('a module of the folder in which it was started')")
    spec = parse_spec({"routers": {"port": 0, "grpc_port": 0}, "auth": {"keys": ["key-12345"]}})
    group = RouterGroup(spec)
    group.start("127.0.0.1:1", secret_file(), tmp_path / "run")
    try:
        _await_listening(group.http_port)
        (child,) = group._children
        first = child.pid
        assert first is not None
        assert b"key-12345" not in Path(f"/proc/{first}/cmdline").read_bytes() and os.getsid(first) == first
        os.kill(first, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while child.pid == first:
            group.watch(serving=True)
            assert time.monotonic() < deadline
            time.sleep(0.02)
        _await_listening(group.http_port)
    finally:
        group.stop()
    written = (tmp_path / "run" / "router.log").read_text()
    assert written.count(" router starts (") == 2 and written.rstrip().endswith(" router has stopped")
    assert "listening" not in capfd.readouterr().err, "the terminal gets warnings"


def _await_listening(port: int) -> None:
    deadline = time.monotonic() + 20
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert time.monotonic() < deadline, "the router does not listen"
        time.sleep(0.05)
