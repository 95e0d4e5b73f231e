"""Reads the request of a call, bounded in time and bytes. gRPC itself would wait for it without a limit."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from headrace_router.api.grpc.health import HEALTH_PREFIX
from headrace_router.core.errors import RequestTimeoutError
from headrace_router.core.limits import Limits

SMALL_BYTES = 1024  # of a request that has a name at most
HEALTH_SECONDS = 1.0  # for a request for health, which needs no key


async def read_request(requests: AsyncIterator[bytes], seconds: float) -> bytes:
    """The one message of a call. Raises RequestTimeoutError."""
    try:
        async with asyncio.timeout(seconds):
            async for request in requests:
                return request
    except TimeoutError:
        pass
    raise RequestTimeoutError(f"The request did not arrive within {seconds:g} s.")


class SmallRequestInterceptor(grpc.aio.ServerInterceptor):
    """For every method with one small request, and for streams that stay open: health, reflection, ListModels."""

    def __init__(self, limits: Limits) -> None:
        self._seconds = limits.header_seconds

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        health = handler_call_details.method.startswith(HEALTH_PREFIX)
        seconds = min(self._seconds, HEALTH_SECONDS) if health else self._seconds
        if handler.unary_unary is not None:
            return grpc.stream_unary_rpc_method_handler(
                _unary(handler, seconds), response_serializer=handler.response_serializer
            )
        if handler.unary_stream is not None:
            return grpc.stream_stream_rpc_method_handler(
                _stream(handler, seconds), response_serializer=handler.response_serializer
            )
        if handler.stream_stream is not None and handler.request_deserializer is not None:
            return grpc.stream_stream_rpc_method_handler(
                _bidirectional(handler), response_serializer=handler.response_serializer
            )
        return handler


def _unary(handler: Any, seconds: float) -> Any:
    async def call(requests: AsyncIterator[bytes], context: Any) -> Any:
        return await handler.unary_unary(await _read(handler, requests, seconds, context), context)

    return call


def _stream(handler: Any, seconds: float) -> Any:
    async def call(requests: AsyncIterator[bytes], context: Any) -> Any:
        async for response in handler.unary_stream(await _read(handler, requests, seconds, context), context):
            yield response

    return call


def _bidirectional(handler: Any) -> Any:
    async def parsed(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        async for data in requests:
            yield await _parse(handler, data, context)

    async def call(requests: AsyncIterator[bytes], context: Any) -> Any:
        async for response in handler.stream_stream(parsed(requests, context), context):
            yield response

    return call


async def _read(handler: Any, requests: AsyncIterator[bytes], seconds: float, context: Any) -> Any:
    try:
        data = await read_request(requests, seconds)
    except RequestTimeoutError as error:
        return await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, error.message)
    return await _parse(handler, data, context)


async def _parse(handler: Any, data: bytes, context: Any) -> Any:
    """A small request; the call ends with an error if the bytes are none, for which gRPC would log a traceback."""
    if len(data) > SMALL_BYTES:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"this request may have {SMALL_BYTES} bytes")
    try:
        return handler.request_deserializer(data)
    except DecodeError:
        return await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this is no message of this method")
