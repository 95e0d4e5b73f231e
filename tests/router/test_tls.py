"""The public addresses with TLS: official clients, client certificates, reloads, handshakes that never end."""

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from pydantic import ValidationError

from headrace_base.private_file import PrivateFileError
from headrace_proto.inference_pb2 import ChatMessage, ChatMessages, GenerateRequest
from headrace_proto.inference_pb2_grpc import InferenceStub
from headrace_router.access import watched_files
from headrace_router.access.tls_config import TlsConfig
from headrace_router.access.tls_files import TlsFileError, TlsFiles, check_tls_files, load_tls_files
from support.certificates import Authority, common_name, passphrase_key

CHAT = ChatMessages(messages=[ChatMessage(role="user", content="hi")])
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
KEY = "a-key-of-a-tenant"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def files(authority: Authority) -> dict[str, Path]:
    cert, key = authority.issue("server")
    return {"cert": cert, "key": key}


@pytest.fixture
def start(harness: Any, make_replica: Any, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(watched_files, "RELOAD_SECONDS", 0.05)

    def begin(replica: dict[str, Any] | None = None, client_ca: Path | None = None, **config: Any) -> Any:
        given = files if client_ca is None else files | {"client_ca": client_ca}
        return harness.start([make_replica(**(replica or {}))], tls=given, **config)

    return begin


def _context(authority: Authority, client: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.file))
    if client is not None:
        context.load_cert_chain(*client)
    return context


def _openai(router: Any, context: ssl.SSLContext) -> Any:
    client: Any = httpx.Client(verify=context, trust_env=False, timeout=20)
    url = f"https://127.0.0.1:{router.http_port}/v1"
    return openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, http_client=client)


def _generate(harness: Any, authority: Authority, client: tuple[Path, Path] | None = None) -> str:
    pair = (None, None) if client is None else (client[1].read_bytes(), client[0].read_bytes())
    credentials = grpc.ssl_channel_credentials(authority.file.read_bytes(), *pair)

    async def call() -> str:
        async with grpc.aio.secure_channel(f"localhost:{harness.router.grpc_port}", credentials) as channel:
            events = InferenceStub(channel).Generate(GenerateRequest(model="tiny", chat=CHAT), timeout=10)
            return "".join([event.text async for event in events])

    return str(harness.call(call()))


@contextlib.contextmanager
def _connected(port: int, context: ssl.SSLContext) -> Iterator[ssl.SSLSocket]:
    with (
        socket.create_connection(("127.0.0.1", port), 5) as raw,
        context.wrap_socket(raw, server_hostname="localhost") as s,
    ):
        yield s


def _served_name(port: int, authority: Authority) -> str:
    context = _context(authority)
    context.set_alpn_protocols(["h2", "http/1.1"])
    with _connected(port, context) as connection:
        certificate = connection.getpeercert(binary_form=True)
    assert certificate is not None
    return common_name(certificate)


def test_official_clients(start: Any, harness: Any, authority: Authority, expected_reply: str) -> None:
    router = start(auth={"keys": [KEY]}, metrics_port=0)
    with _openai(router, _context(authority)) as client:
        whole = client.chat.completions.create(**BODY)
        stream = client.chat.completions.create(**BODY, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert whole.choices[0].message.content == text == expected_reply
    with pytest.raises(openai.APIConnectionError), _openai(router, ssl.create_default_context()) as client:
        client.models.list()
    assert router.info().http.startswith("https://127.0.0.1:") and router.info().metrics.startswith("https://")
    with httpx.Client(verify=_context(authority), trust_env=False) as client:
        assert client.get(router.info().metrics + "/health/ready").status_code == 200
        assert client.get(router.info().metrics + "/metrics").status_code == 401
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        _generate(harness, authority)
    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_grpc(start: Any, harness: Any, authority: Authority, expected_reply: str, tmp_path: Path) -> None:
    start()
    assert _generate(harness, authority) == expected_reply
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        _generate(harness, Authority(tmp_path, "another"))
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


def test_a_client_certificate_is_required(
    start: Any, harness: Any, authority: Authority, tmp_path: Path, expected_reply: str
) -> None:
    clients = Authority(tmp_path, "clients")
    router = start(client_ca=clients.file, metrics_port=0)
    member, foreign = clients.issue("member"), authority.issue("foreign")
    with _openai(router, _context(authority, member)) as client:
        assert client.chat.completions.create(**BODY).choices[0].message.content == expected_reply
    assert _generate(harness, authority, member) == expected_reply
    for pair in (None, foreign):
        with pytest.raises(openai.APIConnectionError), _openai(router, _context(authority, pair)) as client:
            client.models.list()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            _generate(harness, authority, pair)
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    with httpx.Client(verify=_context(authority), trust_env=False) as client:  # a probe has no certificate
        assert client.get(router.info().metrics + "/health/ready").status_code == 200


def test_new_files_are_used_while_a_stream_runs(
    start: Any, harness: Any, authority: Authority, files: dict[str, Path], eventually: Any, expected_reply: str
) -> None:
    router = start(replica={"token_seconds": 0.05})
    ports = (router.http_port, router.grpc_port)
    with _openai(router, _context(authority)) as client:
        stream = client.chat.completions.create(**BODY, stream=True)
        text = next(iter(stream)).choices[0].delta.content or ""
        assert [_served_name(port, authority) for port in ports] == ["server", "server"]
        authority.issue("successor", **files)
        eventually(lambda: [_served_name(port, authority) for port in ports] == ["successor", "successor"])
        files["key"].write_bytes(b"-----BEGIN PRIVATE KEY-----\nbroken\n-----END PRIVATE KEY-----\n")
        time.sleep(0.3)
        assert [_served_name(port, authority) for port in ports] == ["successor", "successor"], "the old pair stays"
        text += "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == expected_reply
    authority.issue("third", **files)
    eventually(lambda: [_served_name(port, authority) for port in ports] == ["third", "third"])


def test_a_session_is_not_resumed_where_clients_need_a_certificate(
    start: Any, authority: Authority, tmp_path: Path, eventually: Any
) -> None:
    """A resumed session would skip the check of a certificate whose authority is no longer accepted."""
    clients = Authority(tmp_path, "clients")
    router = start(client_ca=clients.file)
    context = _context(authority, clients.issue("member"))
    request = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with _connected(router.http_port, context) as connection:
        connection.sendall(request)
        assert connection.recv(12) == b"HTTP/1.1 200"
        session = connection.session
    clients.file.write_bytes(Authority(tmp_path, "others").file.read_bytes())

    def served() -> bool:
        with (
            socket.create_connection(("127.0.0.1", router.http_port), 5) as raw,
            contextlib.suppress(OSError),
            context.wrap_socket(raw, server_hostname="localhost", session=session) as again,
        ):
            again.sendall(request)
            return again.recv(12) == b"HTTP/1.1 200"
        return False

    eventually(lambda: not served())


def test_what_is_no_tls_is_closed_without_harm(start: Any, authority: Authority) -> None:
    router = start()
    for sent in (
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"\x16\x03\x01\xff\xff" + b"\xff" * 70_000,
        b"\x00" * 9,
    ):
        for port in (router.http_port, router.grpc_port):
            with socket.create_connection(("127.0.0.1", port), 5) as client, contextlib.suppress(ConnectionError):
                client.sendall(sent)
                received = b""
                while piece := client.recv(4096):
                    received += piece
                assert b"HTTP/1.1 200" not in received and b"Traceback" not in received
    with _openai(router, _context(authority)) as client:
        assert client.models.list().data


def test_a_handshake_that_has_begun_before_the_router_accepts_succeeds(
    start: Any, harness: Any, authority: Authority
) -> None:
    """As under load: the client's first message waits in the socket when the connection is accepted."""
    router = start()
    sent = threading.Event()
    harness.loop.call_soon_threadsafe(sent.wait, 10)  # the event loop accepts nothing meanwhile
    with socket.create_connection(("127.0.0.1", router.http_port), 5) as sock:
        secure = _context(authority).wrap_socket(sock, server_hostname="localhost", do_handshake_on_connect=False)
        secure.setblocking(False)
        with pytest.raises(ssl.SSLWantReadError):
            secure.do_handshake()
        sent.set()
        secure.settimeout(5)
        secure.do_handshake()
        secure.close()


def test_files_that_cannot_be_used_are_named(authority: Authority, files: dict[str, Path], tmp_path: Path) -> None:
    other = authority.issue("other")

    def refusal(kind: type[Exception] = TlsFileError, **changed: Path) -> str:
        with pytest.raises(kind) as refused:
            TlsFiles(TlsConfig.model_validate(files | changed))
        return str(refused.value)

    assert f"{other[1]} is not that of the certificate {files['cert']}" in refusal(key=other[1])
    assert "No such file" in refusal(cert=tmp_path / "missing")
    text = tmp_path / "text"
    text.touch(mode=0o600)
    assert "must be PEM" in refusal(cert=text)
    assert "no certificates in PEM" in refusal(client_ca=text)
    locked = tmp_path / "locked"
    locked.touch(mode=0o600)
    locked.write_bytes(passphrase_key())
    assert "has a passphrase" in refusal(key=locked)
    trusted = tmp_path / "trusted"
    trusted.touch(mode=0o600)
    trusted.write_bytes(files["cert"].read_bytes().replace(b" CERTIFICATE", b" TRUSTED CERTIFICATE"))  # -trustout
    assert f"{trusted} cannot be used" in refusal(cert=trusted, key=files["key"])
    assert "swapped" in refusal(cert=files["key"], key=files["cert"])
    files["cert"].chmod(0o644)
    TlsFiles(TlsConfig.model_validate(files))  # a certificate is public
    files["cert"].chmod(0o664)
    assert f"chmod go-w {files['cert']}" in refusal(PrivateFileError)
    files["cert"].chmod(0o600)
    files["key"].chmod(0o640)
    assert f"chmod 600 {files['key']}" in refusal(PrivateFileError)
    for wrong in ({"cert": files["cert"]}, {"key": files["key"]}, {"client_ca": authority.file}):
        with pytest.raises(ValidationError, match="--tls-cert and --tls-key"):
            TlsConfig.model_validate(wrong)


def test_files_with_which_no_client_could_connect_are_refused(authority: Authority, files: dict[str, Path]) -> None:
    def check(**changed: Path) -> None:
        config = TlsConfig.model_validate(files | changed)
        check_tls_files(config, load_tls_files(config))

    check(client_ca=authority.file)
    with pytest.raises(TlsFileError, match="are no authorities"):
        check(client_ca=authority.issue("leaf")[0])
    loaded = TlsFiles(TlsConfig.model_validate(files))
    before = loaded.current.context
    for days, reason in (((-9, -2), "has expired on"), ((2, 9), "is valid from")):
        authority.days = days
        authority.issue("dated", **files)
        with pytest.raises(TlsFileError, match=reason):
            check()
        assert not loaded.refresh() and loaded.current.context is before, "the earlier one stays in use"
    assert TlsFiles(TlsConfig.model_validate(files)), "a restarted process uses what there is"
