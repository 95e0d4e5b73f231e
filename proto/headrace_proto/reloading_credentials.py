"""Credentials of a gRPC server that may change while it serves."""

from collections.abc import Callable
from typing import TypeVar

import grpc

T = TypeVar("T")


def reloading_credentials(
    current: Callable[[], T], configure: Callable[[T], grpc.ServerCertificateConfiguration], *, require_client: bool
) -> grpc.ServerCredentials:
    """Each handshake uses what `current` returns then; open connections are not affected.

    current: returns the same object until it changes. gRPC calls it in each handshake, in a thread of its own:
    unauthenticated peers can cause it, so it is cheap. require_client: whether clients need a certificate.
    """
    used = current()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        if used is (found := current()):
            return None
        used = found
        return configure(found)

    return grpc.dynamic_ssl_server_credentials(configure(used), changed, require_client)  # type: ignore[arg-type]  # None too
