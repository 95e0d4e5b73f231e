"""The cluster's secret on internal gRPC calls (docs/reliability.md R2)."""

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from headrace_proto.call_refusal import unauthenticated_handler

SECRET_KEY = "headrace-secret"


def secret_metadata(secret: bytes) -> tuple[tuple[str, str], ...]:
    """The metadata that a caller sends with every internal call."""
    return ((SECRET_KEY, secret.hex()),)


def secret_matches(metadata: Any, secret: bytes) -> bool:
    """Whether invocation metadata (pairs of key and value) carries the secret; compared in constant time."""
    expected = secret.hex().encode()
    given = b""
    for key, value in metadata or ():
        if key == SECRET_KEY:
            given = value if isinstance(value, bytes) else value.encode()
    return hmac.compare_digest(given, expected)


class SecretInterceptor(grpc.aio.ServerInterceptor):
    """Refuses every call without the secret as UNAUTHENTICATED, before the method is looked up."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        if secret_matches(handler_call_details.invocation_metadata, self._secret):
            return await continuation(handler_call_details)
        handler = await continuation(handler_call_details)
        return unauthenticated_handler(handler, "the cluster's secret is missing or wrong")
