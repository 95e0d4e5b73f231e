"""Heads of requests: offers of another protocol are ignored; a host and a key that are given twice are refused."""

import contextlib
import re
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer

from headrace_proto.inference_pb2 import GenerateRequest, ListModelsRequest
from headrace_proto.inference_pb2_grpc import InferenceStub
from support.certificates import Authority
from support.router.fake_replica import FakeReplica
from support.router.harness import Harness

KEY = "a-key-of-a-tenant"
BODY = b'{"model": "tiny", "prompt": "x", "max_tokens": 2}'
SIZED = (b"content-length: %d" % len(BODY), BODY)
CHUNKED = (b"Transfer-Encoding: chunked", b"10\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n" % (BODY[:16], len(BODY) - 16, BODY[16:]))
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nUpgrade: h2c"
WEBSOCKET = b"Connection: keep-alive, Upgrade\r\nUPGRADE: websocket\r\nSec-WebSocket-Version: 13"
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
LAST = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
Send = Callable[[bytes], bytes]


def _post(offer: bytes, framed: tuple[bytes, bytes]) -> bytes:
    lines = (b"POST /v1/completions HTTP/1.1", b"Host: localhost", b"Content-Type: application/json", offer, framed[0])
    return b"\r\n".join(lines) + b"\r\n\r\n" + framed[1]


def _get(*headers: bytes, target: bytes = b"/health") -> bytes:
    return b"\r\n".join((b"GET %s HTTP/1.1" % target, *headers, b"connection: close", b"", b""))


@pytest.fixture(scope="module", params=["http", "https"])
def send(request: Any, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Send]:
    """Sends bytes, and returns what is received until the server closes."""
    made, trust = Harness(), None
    options: dict[str, Any] = {}
    if request.param == "https":
        folder: Path = tmp_path_factory.mktemp("tls")
        authority = Authority(folder)
        cert, key = authority.issue("server")
        trust, options = ssl.create_default_context(cafile=str(authority.file)), {"tls": {"cert": cert, "key": key}}
    router = made.start([FakeReplica(tokenizer)], **options)

    def exchange(sent: bytes) -> bytes:
        sock = socket.create_connection(("127.0.0.1", router.http_port), 10)
        if trust is not None:
            sock = trust.wrap_socket(sock, server_hostname="localhost")
        received = b""
        with sock:
            sock.sendall(sent)
            while more := sock.recv(1 << 16):
                received += more
        return received

    yield exchange
    made.close()


@pytest.mark.parametrize("framed", [SIZED, CHUNKED], ids=["sized", "chunked"])
@pytest.mark.parametrize("offer", [H2C, WEBSOCKET], ids=["h2c", "websocket"])
def test_an_offer_of_another_protocol_is_ignored(send: Send, offer: bytes, framed: tuple[bytes, bytes]) -> None:
    received = send(_post(offer, framed) + _post(offer, framed) + LAST)
    assert STATUS.findall(received) == [b"200", b"200", b"200"], received
    assert received.count(b'"finish_reason":"length"') == 2 and b"101" not in STATUS.findall(received)


def test_connect_is_refused(send: Send) -> None:
    for target in (b"localhost:80", b"/health"):
        received = send(b"CONNECT %s HTTP/1.1\r\nhost: localhost\r\n\r\n" % target + GET)
        assert STATUS.findall(received) == [b"400"]


@pytest.mark.parametrize(
    "hosts", [(b"evil.example", b"localhost"), (b"localhost", b"evil.example"), (b"localhost",) * 2]
)
def test_more_than_one_host_is_refused(send: Send, hosts: tuple[bytes, ...]) -> None:
    assert STATUS.findall(send(_get(*(b"Host: " + host for host in hosts)))) == [b"400"]


@pytest.fixture(scope="module")
def keyed(tokenizer: Tokenizer) -> Iterator[Harness]:
    made = Harness()
    made.start([FakeReplica(tokenizer)], auth={"keys": [{"name": "one", "key": KEY}], "metrics_key": "a-metrics-key"})
    yield made
    made.close()


@pytest.mark.parametrize("path", ["/v1/models", "/metrics"])
@pytest.mark.parametrize("first", [True, False])
def test_two_keys_are_refused(keyed: Harness, path: str, first: bool) -> None:
    value = f"Bearer {KEY if path == '/v1/models' else 'a-metrics-key'}"
    with keyed.client() as client:
        assert client.get(path, headers={"authorization": value}).status_code == 200
        for other in (value, "Bearer wrong", ""):
            pair = [("authorization", value), ("Authorization", other)]
            answer = client.get(path, headers=pair if first else pair[::-1])
            assert answer.status_code == 401 and "once" in answer.json()["error"]["message"]


def test_two_keys_are_refused_over_grpc(keyed: Harness) -> None:
    assert keyed.router is not None
    address = f"127.0.0.1:{keyed.router.grpc_port}"
    value = ("authorization", f"Bearer {KEY}")

    async def ask(*metadata: tuple[str, str]) -> list[grpc.StatusCode]:
        async with grpc.aio.insecure_channel(address) as channel:
            stub: Any = InferenceStub(channel)
            generated = stub.Generate(GenerateRequest(model="tiny", prompt="x"), metadata=metadata)
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for _ in generated:
                    pass
            return [await stub.ListModels(ListModelsRequest(), metadata=metadata).code(), await generated.code()]

    assert keyed.call(ask(value)) == [grpc.StatusCode.OK] * 2
    for other in ("Bearer wrong", value[1]):
        for pair in ((value, ("authorization", other)), (("authorization", other), value)):
            assert keyed.call(ask(*pair)) == [grpc.StatusCode.UNAUTHENTICATED] * 2
