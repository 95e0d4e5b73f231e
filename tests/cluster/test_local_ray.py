"""Starting and joining a Ray: the errors, without a Ray."""

import socket
import threading
import time

import pytest

from headrace_cluster.errors import RayStartError
from headrace_cluster.ray import connection
from headrace_cluster.ray.connection import await_gcs
from headrace_cluster.ray.local_ray import start_error
from headrace_cluster.spec.cluster_spec import parse_spec


def test_an_address_at_which_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        await_gcs(f"127.0.0.1:{port}", 0.1)
    with pytest.raises(RayStartError, match=rf"no Ray answers at 127.0.0.1:{port} \(Connection refused\)"):
        await_gcs(f"127.0.0.1:{port}", 0.1)
    await_gcs("auto")


@pytest.mark.parametrize("address", ["a..b:6379", "no-such-host.invalid:6379"])
def test_a_name_that_is_none_is_refused_at_once(address: str) -> None:
    with pytest.raises(RayStartError, match="no Ray answers at"):
        await_gcs(address)


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
    absent, told, pauses = [1, 1], list[str](), list[float]()

    def await_gcs(address: str, seconds: float) -> None:
        if absent:
            absent.pop()
            raise RayStartError(f"no Ray answers at {address}")

    def join(spec: object) -> str:
        raise RayStartError("no Ray could be joined")

    def start_anew() -> None:
        raise SystemExit("anew")

    for name, replacement in (("await_gcs", await_gcs), ("join", join), ("_start_anew", start_anew)):
        monkeypatch.setattr(connection, name, replacement)
    monkeypatch.setattr(time, "sleep", pauses.append)
    with pytest.raises(SystemExit, match="anew"):
        connection.join_when_up(parse_spec({"ray": {"address": "head:6379"}}), told.append)
    assert [line.partition(";")[0] for line in told] == 2 * ["no Ray answers at head:6379"] + ["no Ray could be joined"]
    assert min(pauses) > 9, "a line in ten seconds"


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (
            Exception("The current node timed out during startup. This could happen"),
            "overloaded: run it again, or see ray/",
        ),
        (TimeoutError("30 seconds passed."), "overloaded: run it again, or see ray/"),
        (ValueError("no space left on the device\nat /tmp"), "no space left on the device; see ray/"),
    ],
)
def test_a_failed_start_of_ray_ends_with_what_to_do(error: Exception, remedy: str) -> None:
    sentence = str(start_error(error))
    assert sentence.startswith("Ray did not start: ") and sentence.endswith(f"{remedy} in the log folder")
