"""TLS of the admin API, and of client commands: a server's certificate is verified, whatever it is."""

import asyncio
import contextlib
import http.client
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
from headrace_cluster.cli.api_client import ApiClient, api_client
from headrace_cluster.cli.servers import ServerChoice
from headrace_cluster.controller.admin import admin_app, admin_server, listen
from headrace_cluster.errors import CertificateError, NotRunningError, ServerChoiceError, ServerError, SpecError
from headrace_cluster.launch.server_record import ServerRecord
from headrace_cluster.launch.start_checks import check_files
from headrace_cluster.local import state
from headrace_cluster.local.processes import ProcessId
from headrace_cluster.local.tls_client import trusted
from headrace_cluster.spec.cluster_spec import ClusterSpec, parse_spec
from headrace_cluster.spec.key_rules import KeyRules
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


def test_the_admin_api_bounds_headers_as_a_router_does() -> None:
    head = b"GET /status HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %s\r\n" % KEY.encode()
    with _admin_api(None) as port:
        for headers, status in ((b"", b" 200 "), (b"a:b\r\n" * 10_000, b" 431 ")):
            with socket.create_connection(("127.0.0.1", port), 5) as connection:
                connection.sendall(head + headers + b"connection: close\r\n\r\n")
                assert status in connection.makefile("rb").readline()


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
    other.write_bytes(b"nothing")
    with pytest.raises(CertificateError, match="no certificate in PEM"):
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
    with pytest.raises(CertificateError, match="the certificate and its key"):
        models("localhost", ca=authority.file, client_cert=authority.file)
    with pytest.raises(SpecError, match="--host"):
        models("ftp://localhost")
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
    for url in ("https://", "http://localhost:8002/status", "http://localhost:port"):
        with pytest.raises(SpecError, match=r"must be like https://HOST:8002"):
            AdminClient(ServerChoice(url=url))
    with pytest.raises(NotRunningError, match="no server answers at localhost:1"):
        AdminClient(ServerChoice(url="http://localhost:1")).call("GET", "/status")
    with pytest.raises(ServerChoiceError, match="for servers on this machine"):
        api_client(ServerChoice(url="http://localhost:1"), None, None)


def test_only_an_api_beyond_loopback_answers_under_another_name() -> None:
    for local, status in ((True, 403), (False, 200)):
        with _admin_api(None, local=local) as port:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/status", headers={"host": "head.llm", "authorization": f"Bearer {KEY}"})
            assert connection.getresponse().status == status
            connection.close()


@contextlib.contextmanager
def _answering_once(answer: bytes) -> Iterator[int]:
    """The port of a server that sends this to its first client, and closes the connection."""
    with listen("127.0.0.1", 0) as bound:
        bound.listen()

        def close() -> None:
            client, _ = bound.accept()
            with client:
                client.sendall(answer)

        closing = threading.Thread(target=close)
        closing.start()
        yield bound.getsockname()[1]
        closing.join()


def test_a_closed_connection_names_the_client_certificate() -> None:
    with _answering_once(b"") as port, pytest.raises(CertificateError, match="--client-cert FILE"):
        ApiClient("127.0.0.1", port, None, trusted(None)).models()


def test_an_admin_port_without_tls_is_named_as_the_reason(files: dict[str, Path]) -> None:
    with _answering_once(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        _save(port, files["cert"])
        with pytest.raises(CertificateError, match="does this port use TLS"):
            AdminClient(ServerChoice()).call("GET", "/status")


def test_an_admin_api_that_closes_the_connection_does_not_answer(files: dict[str, Path]) -> None:
    """A controller that ends; this API never requires a client certificate."""
    with _answering_once(b"") as port:
        _save(port, files["cert"])
        with pytest.raises(NotRunningError):
            AdminClient(ServerChoice()).call("GET", "/status")


def _spec(files: dict[str, Path], **more: Any) -> ClusterSpec:
    return parse_spec({"tls": {name: str(path) for name, path in files.items()}} | more)


def test_a_start_refuses_files_that_cannot_be_used(files: dict[str, Path], authority: Authority) -> None:
    check_files(_spec(files), with_router=True)
    with pytest.raises(TlsFileError, match="is not that of"):
        check_files(_spec(files | {"key": authority.issue("other")[1]}), with_router=True)
    with pytest.raises(SpecError, match="--tls-cert and --tls-key belong together"):
        _spec({"cert": files["cert"]})


def test_what_is_shown_has_the_scheme(files: dict[str, Path], authority: Authority) -> None:
    spec = _spec(files | {"client_ca": authority.file}, auth={"keys": ["a-key-of-a-tenant"]})
    record = ServerRecord(spec, with_router=True).state
    assert (record.http_url, record.admin_url) == ("https://127.0.0.1:8000", "https://127.0.0.1:8002")
    rules = KeyRules.of(spec)
    assert rules.api == "needs a client certificate; needs an API key"
    assert rules.health == "needs a client certificate; no key" and rules.metrics == "needs an API key"
    assert spec.metrics_ports == (8003,), "probes have no client certificate"
    assert _spec(files).metrics_ports == ()
