"""TLS 1.3 connections whose client changes its key without end (RFC 8446, section 4.6.3)."""

import socket
import ssl
import tempfile
from pathlib import Path

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

KEY_UPDATE = bytes([24, 0, 0, 1, 1])  # the other side has to change its key, too
HANDSHAKE = 22  # the type of a record's content


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


def records(secret: bytes, count: int) -> bytes:
    """As many changes of the key; each is encrypted with the key before it."""
    sent = b""
    content = KEY_UPDATE + bytes([HANDSHAKE])
    header = bytes([23, 3, 3]) + (len(content) + 16).to_bytes(2, "big")
    for _ in range(count):
        key, nonce = _expand(secret, b"key", 32), _expand(secret, b"iv", 12)
        sent += header + AESGCM(key).encrypt(nonce, content, header)
        secret = _expand(secret, b"traffic upd", 48)
    return sent


def _expand(secret: bytes, label: bytes, length: int) -> bytes:
    """HKDF-Expand-Label (RFC 8446, section 7.1)."""
    name = b"tls13 " + label
    info = length.to_bytes(2, "big") + bytes([len(name)]) + name + b"\0"
    return HKDFExpand(hashes.SHA384(), length, info).derive(secret)
