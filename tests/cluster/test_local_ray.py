"""Starting and joining a Ray, and its lost GCS: without a Ray."""

import os
import socket
import threading
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace_cluster.errors import RayLostError, RayStartError
from headrace_cluster.ray import connection, local_ray, private
from headrace_cluster.ray.connection import await_gcs
from headrace_cluster.spec.cluster_spec import parse_spec


def test_an_address_at_which_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        await_gcs(f"127.0.0.1:{port}", 0.1)
    for address in (f"127.0.0.1:{port}", "a..b:6379"):
        with pytest.raises(RayStartError, match=f"no Ray answers at {address}"):
            await_gcs(address, 0.1)
    await_gcs("auto")


def test_a_ray_that_starts_meanwhile() -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        address = reserved.getsockname()

    def listen() -> None:
        time.sleep(0.7)
        servers.append(socket.create_server(address))

    servers: list[socket.socket] = []
    thread = threading.Thread(target=listen)
    thread.start()
    try:
        await_gcs(f"{address[0]}:{address[1]}")
    finally:
        thread.join()
        for server in servers:
            server.close()


def test_a_controller_waits_for_its_ray_and_starts_anew_after_a_failed_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray's client cannot connect twice in a process."""
    absent, told = [1, 1], list[str]()

    def await_gcs(address: str, seconds: float) -> None:
        if absent:
            absent.pop()
            raise RayStartError(f"no Ray answers at {address}")

    def join(spec: object) -> str:
        raise RayStartError("no Ray could be joined")

    def execute(*_: object) -> None:
        raise SystemExit("anew")

    monkeypatch.setattr(connection, "await_gcs", await_gcs)
    monkeypatch.setattr(connection, "join", join)
    monkeypatch.setattr(os, "execv", execute)
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)
    with pytest.raises(SystemExit, match="anew"):
        connection.join_when_up(parse_spec({"ray": {"address": "head:6379"}}), told.append)
    assert [line.partition(";")[0] for line in told] == 2 * ["no Ray answers at head:6379"] + ["no Ray could be joined"]


def test_a_lost_gcs_is_started_again_at_once_then_with_growing_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, dead, starts = [100.0], set[str](), list[float]()

    def restart() -> None:
        starts.append(now[0])
        if len(starts) > 1:
            raise OSError("no memory")
        dead.clear()

    node = SimpleNamespace(
        address="127.0.0.1:1", dashboard="", dead_processes=lambda: set(dead), restart_gcs=restart, stop=lambda: None
    )
    with monkeypatch.context() as patched:
        patched.setattr(local_ray, "_set_environment", lambda *_: None)
        patched.setattr(private, "HeadNode", lambda *_, **__: node)
        ray = local_ray.LocalRay(parse_spec({}), tmp_path, tmp_path)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    assert ray.check() == ""
    dead.add("gcs_server")
    assert "another one was started" in ray.check() and starts == [100.0]
    dead.add("gcs_server")
    failures = 0
    for _ in range(600):
        failures += "OSError" in ray.check()
        now[0] += 0.5
    pauses = [after - before for before, after in pairwise(starts)]
    assert failures == len(starts) - 1 > 5 and max(pauses) > 10 > 2 >= pauses[0]
    dead.add("raylet")
    with pytest.raises(RayLostError):
        ray.check()
