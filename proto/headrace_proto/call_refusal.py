"""Refuses a gRPC call before its method runs."""

from collections.abc import AsyncIterator
from typing import Any

import grpc


def unauthenticated_handler(sentence: str) -> Any:
    """A handler that aborts every call with UNAUTHENTICATED, of any kind of method: it waits for no request."""

    async def refuse(_requests: Any, context: Any) -> AsyncIterator[None]:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, sentence)
        yield None

    return grpc.stream_stream_rpc_method_handler(refuse)
