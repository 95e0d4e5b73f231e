"""TLS 1.3 connections whose client changes its key without end (RFC 8446, section 4.6.3)."""

import functools
import socket
import ssl
import tempfile
from collections.abc import Iterable
from pathlib import Path

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

KEY_UPDATE = bytes([24, 0, 0, 1, 1])  # the other side has to change its key, too
HANDSHAKE, APPLICATION_DATA = 22, 23  # types of a record's content


def connect(port: int) -> tuple[socket.socket, bytes]:
    """A connection after its handshake, and the client's first secret for application data."""
    with tempfile.NamedTemporaryFile() as keys:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.keylog_filename = keys.name
        raw = socket.create_connection(("127.0.0.1", port), 10)
        secure = context.wrap_socket(raw)
        assert secure.cipher()[0] == "TLS_AES_256_GCM_SHA384"  # type: ignore[index]
        lines = Path(keys.name).read_text().splitlines()
    secret = next(line.split()[2] for line in lines if line.startswith("CLIENT_TRAFFIC_SECRET_0"))
    return socket.socket(fileno=secure.detach()), bytes.fromhex(secret)


def records(secret: bytes, count: int, first: bytes = b"") -> bytes:
    """As many changes of the key; each is encrypted with the key before it. first: application data before these."""
    sent, number = b"", 0
    if first:
        sent, number = application_data(secret, [first]), 1
    for _ in range(count):
        sent += _record(secret, number, KEY_UPDATE + bytes([HANDSHAKE]))
        secret, number = _expand(secret, b"traffic upd", 48), 0
    return sent


def application_data(secret: bytes, parts: Iterable[bytes]) -> bytes:
    """A record for each part, from the first one of the connection on."""
    return b"".join(_record(secret, number, part + bytes([APPLICATION_DATA])) for number, part in enumerate(parts))


def _record(secret: bytes, number: int, content: bytes) -> bytes:
    """number: of the records before it with this secret."""
    key, iv = _keys(secret)
    nonce = (int.from_bytes(iv, "big") ^ number).to_bytes(12, "big")
    header = bytes([23, 3, 3]) + (len(content) + 16).to_bytes(2, "big")
    return header + key.encrypt(nonce, content, header)


@functools.lru_cache(1)
def _keys(secret: bytes) -> tuple[AESGCM, bytes]:
    return AESGCM(_expand(secret, b"key", 32)), _expand(secret, b"iv", 12)


def _expand(secret: bytes, label: bytes, length: int) -> bytes:
    """HKDF-Expand-Label (RFC 8446, section 7.1)."""
    name = b"tls13 " + label
    info = length.to_bytes(2, "big") + bytes([len(name)]) + name + b"\0"
    return HKDFExpand(hashes.SHA384(), length, info).derive(secret)
