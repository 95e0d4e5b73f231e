"""Refuses a gRPC call before its method runs."""

from typing import Any

import grpc


def unauthenticated_handler(handler: Any, sentence: str) -> Any:
    """A handler that aborts every call with UNAUTHENTICATED. handler: of the method; None = it is unknown.

    It streams requests, whatever the method does, so that it does not wait for one.
    """

    async def refuse_unary(_requests: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, sentence)

    async def refuse_stream(_requests: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, sentence)
        yield None

    if handler is not None and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse_stream)
    return grpc.stream_unary_rpc_method_handler(refuse_unary)
