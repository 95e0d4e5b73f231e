"""The first bytes of a TLS client."""

import contextlib
import ssl


def tls_hello() -> bytes:
    """A ClientHello."""
    sent = ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), sent, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return sent.read()
