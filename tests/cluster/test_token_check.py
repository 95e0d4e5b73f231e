"""A joined Ray must need its token: with the GCS server of the installed Ray, alone."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray

from headrace_cluster.errors import OpenRayError, RayStartError
from headrace_cluster.ray import connection
from headrace_cluster.ray.connection import check_token
from headrace_cluster.spec.cluster_spec import parse_spec
from support.child_environment import child_environment
from support.ports import free_port

GCS_SERVER = Path(ray.__file__).parent / "core" / "src" / "ray" / "gcs" / "gcs_server"


@pytest.fixture
def start_gcs(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """start_gcs(mode): its address."""
    started: list[subprocess.Popen[bytes]] = []

    def start(mode: str) -> str:
        port = free_port()
        flags = {"gcs_server_port": port, "node-ip-address": "127.0.0.1", "session-name": "s", "log_dir": tmp_path}
        command = [str(GCS_SERVER), "--config_list=", *(f"--{name}={value}" for name, value in flags.items())]
        environ = child_environment(RAY_AUTH_MODE=mode, RAY_AUTH_TOKEN="0" * 64)
        quiet = subprocess.DEVNULL
        started.append(subprocess.Popen(command, env=environ, stdout=quiet, stderr=quiet, start_new_session=True))
        connection.await_gcs(f"127.0.0.1:{port}")
        return f"127.0.0.1:{port}"

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_ray_without_a_token_is_not_joined(start_gcs: Callable[..., str]) -> None:
    address = start_gcs("disabled")
    with pytest.raises(OpenRayError, match=f"{address} needs no token.*--ray-no-auth"):
        connection.join(parse_spec({"ray": {"address": address}}))


def test_others_are_joined(start_gcs: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One with a token, and one that the operator allows."""
    joined: list[str] = []

    def init(address: str, **options: object) -> None:
        joined.append(address)
        raise ConnectionError("no raylet")

    monkeypatch.setattr(ray, "init", init)
    address = start_gcs("disabled")
    with pytest.raises(RayStartError, match="no raylet"):
        connection.join(parse_spec({"ray": {"address": address, "no_auth": True}}))
    assert joined == [address]
    check_token(start_gcs("token"))
