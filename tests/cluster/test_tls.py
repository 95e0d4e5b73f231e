"""TLS of the admin API, and of client commands: a server's certificate is verified, whatever it is."""

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace_cluster.cli import main
from headrace_cluster.cli.admin_client import AdminClient
from headrace_cluster.cli.api_client import api_client
from headrace_cluster.cli.servers import ServerChoice
from headrace_cluster.controller.admin import admin_app, admin_server, listen
from headrace_cluster.errors import CertificateError, NotRunningError, ServerError, SpecError
from headrace_cluster.launch.start_checks import check_files
from headrace_cluster.local import state
from headrace_cluster.local.processes import ProcessId
from headrace_cluster.spec.cluster_spec import ClusterSpec, parse_spec
from headrace_router.access.tls_config import TlsConfig
from headrace_router.access.tls_files import TlsFileError, TlsFiles
from support.certificates import Authority

KEY = "the-key"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def files(authority: Authority) -> dict[str, Path]:
    cert, key = authority.issue("server")
    return {"cert": cert, "key": key}


@pytest.fixture
def port(files: dict[str, Path]) -> Iterator[int]:
    """Of an admin API with TLS."""
    with _admin_api(TlsFiles(TlsConfig(**files))) as port:
        yield port


@contextlib.contextmanager
def _admin_api(tls: TlsFiles | None, *, local: bool = True) -> Iterator[int]:
    bound = listen("127.0.0.1", 0)
    keys = [b"another key", KEY.encode()]
    server = admin_server(admin_app(lambda: keys, {"/status": lambda: {"replicas": []}}, lambda: None, [], local), tls)
    running = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[bound])))
    running.start()
    deadline = time.monotonic() + 10
    while not server.started:
        assert time.monotonic() < deadline, "it does not listen"
        time.sleep(0.01)
    yield bound.getsockname()[1]
    server.should_exit = True
    running.join(5)


def _status(port: int, host: str, headers: bytes = b"") -> int:
    head = b"GET /status HTTP/1.1\r\nhost: %s\r\nauthorization: Bearer %s\r\n" % (host.encode(), KEY.encode())
    with socket.create_connection(("127.0.0.1", port), 5) as connection:
        connection.sendall(head + headers + b"connection: close\r\n\r\n")
        return int(connection.makefile("rb").readline().split()[1])


def test_the_admin_api_bounds_headers_and_on_loopback_serves_this_machine_alone() -> None:
    with _admin_api(None) as port:
        assert _status(port, "localhost") == 200
        assert _status(port, "localhost", b"a:b\r\n" * 10_000) == 431
        assert _status(port, "head.llm") == 403
    with _admin_api(None, local=False) as port:
        assert _status(port, "head.llm") == 200


def _save(port: int, cert: Path) -> None:
    me = ProcessId.of(os.getpid())
    assert me is not None
    url = f"https://127.0.0.1:{port}"
    state.save(state.ServeState(me.pid, me.started, "headrace", url, KEY, port, url, tls_cert=str(cert)))


def test_commands_of_this_machine_accept_the_certificate_in_the_servers_file_alone(
    port: int, files: dict[str, Path], authority: Authority
) -> None:
    _save(port, files["cert"])
    assert AdminClient(ServerChoice()).call("GET", "/status") == {"replicas": []}
    with pytest.raises(ServerError):  # it is not the public API, but the connection is accepted
        api_client(ServerChoice(), None, KEY).models()
    chain = files["cert"].read_bytes() + authority.file.read_bytes()
    other, _ = authority.issue("other")
    other.write_bytes(other.read_bytes() + chain)
    _save(port, other)
    with pytest.raises(CertificateError, match="is not accepted"):  # although the same authority signed both
        AdminClient(ServerChoice()).call("GET", "/status")


def test_a_server_elsewhere_is_verified_by_name_and_authority(
    port: int, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ServerChoice(port=port, given="--port")

    def models(host: str, **options: Any) -> Any:
        return api_client(given, host, KEY, **options).models()

    for host in ("localhost", "https://localhost/", "127.0.0.1"):
        with pytest.raises(ServerError):
            models(host, ca=authority.file)
    with pytest.raises(CertificateError, match="--ca FILE"):
        models("https://localhost")
    with pytest.raises(CertificateError, match="--ca FILE"):
        models("localhost", ca=Authority(tmp_path, "another").file)
    with pytest.raises(CertificateError, match=r"missing \(--ca\)"):
        models("localhost", ca=tmp_path / "missing")
    with pytest.raises(NotRunningError):  # plain HTTP
        models("localhost")
    monkeypatch.setenv("HEADRACE_ADMIN_KEY", KEY)
    monkeypatch.setenv("HEADRACE_CA", str(authority.file))
    assert AdminClient(ServerChoice(admin_port=port, given="--admin-port")).call("GET", "/status") == {"replicas": []}


def test_a_cluster_elsewhere_is_named_by_the_url_of_its_admin_api(
    files: dict[str, Path], authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key_file = tmp_path / "admin-key"
    key_file.touch(mode=0o600)
    key_file.write_text(f"{KEY}\nthe key before\n")
    monkeypatch.setenv("HEADRACE_CA", str(authority.file))

    def status(url: str) -> int:
        """The exit status of the command line, which puts its flags into the environment."""
        with monkeypatch.context() as patched:
            patched.setenv("HEADRACE_SERVER_KEY_FILE", "")
            patched.setenv("HEADRACE_SERVER", "")
            patched.setattr(
                "sys.argv", ["headrace", "--cluster", url, "--admin-key-file", str(key_file), "status", "--json"]
            )
            with pytest.raises(SystemExit) as ended:
                main()
            return int(ended.value.code or 0)

    with _admin_api(TlsFiles(TlsConfig(**files)), local=False) as port:
        assert status(f"https://localhost:{port}") == 0
        key_file.write_text("a wrong key")
        assert status(f"https://localhost:{port}") == 1
    with pytest.raises(SpecError, match="needs its key: --admin-key-file FILE"):
        AdminClient(ServerChoice(url="https://localhost"))
    monkeypatch.setenv("HEADRACE_ADMIN_KEY", KEY)
    with pytest.raises(SpecError, match=r"must be like https://HOST:8002"):
        AdminClient(ServerChoice(url="http://localhost:8002/status"))
    with pytest.raises(NotRunningError, match="no server answers at localhost:1"):
        AdminClient(ServerChoice(url="http://localhost:1")).call("GET", "/status")


def test_a_start_refuses_files_that_cannot_be_used(files: dict[str, Path], authority: Authority) -> None:
    def spec(**paths: Path) -> ClusterSpec:
        return parse_spec({"tls": {name: str(path) for name, path in paths.items()}})

    check_files(spec(**files), with_router=True)
    with pytest.raises(TlsFileError, match="is not that of"):
        check_files(spec(cert=files["cert"], key=authority.issue("other")[1]), with_router=True)
    with pytest.raises(SpecError, match="--tls-cert and --tls-key belong together"):
        spec(cert=files["cert"])
