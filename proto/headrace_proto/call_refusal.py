"""Refuses a gRPC call before its method runs."""

from typing import Any

import grpc


def unauthenticated_handler(handler: Any, sentence: str) -> Any:
    """A handler of the same kind as `handler` (None: of a unary call) that aborts every call with UNAUTHENTICATED."""

    async def refuse_unary(_request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, sentence)

    async def refuse_stream(_request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, sentence)
        yield None

    streams_in = handler is not None and handler.request_streaming
    if handler is not None and handler.response_streaming:
        make = grpc.stream_stream_rpc_method_handler if streams_in else grpc.unary_stream_rpc_method_handler
        return make(refuse_stream)
    make = grpc.stream_unary_rpc_method_handler if streams_in else grpc.unary_unary_rpc_method_handler
    return make(refuse_unary)
