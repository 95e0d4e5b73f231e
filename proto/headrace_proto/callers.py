"""Which component may call which method of an internal service."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from headrace_proto.caller_streams import STREAMS_PER_CALLER, CallerStreams
from headrace_proto.component import Component

CALLERS = {
    "/headrace.v1.Replica/Describe": Component.ROUTER,
    "/headrace.v1.Replica/Serve": Component.ROUTER,
    "/headrace.v1.Replica/WatchCache": Component.ROUTER,
    "/headrace.v1.Replica/Transfer": Component.REPLICA,
    "/headrace.v1.Replica/WatchHealth": Component.CONTROLLER,
    "/headrace.v1.Control/Watch": Component.ROUTER,
    "/headrace.v1.Control/Report": Component.ROUTER,
    "/headrace.v1.Control/Renew": Component.ROUTER,
}


class CallerInterceptor(grpc.aio.ServerInterceptor):
    """Runs a method only for its component in `CALLERS`. The server's credentials have verified the certificate.

    Bytes that are no message end the call with INVALID_ARGUMENT; gRPC itself would log a traceback. Of one server.
    """

    def __init__(self, streams: CallerStreams | None = None) -> None:
        """streams: of this server; its owner shows which callers are refused."""
        self._streams = streams or CallerStreams()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # an unknown method: UNIMPLEMENTED
        return _guarded(handler, handler_call_details.method, self._streams)


def caller_name(context: Any) -> str:
    """The name in the caller's certificate."""
    return b"".join(context.auth_context().get("x509_common_name", ())).decode()


def caller_certificate(context: Any) -> bytes:
    """The caller's certificate, as PEM."""
    return b"".join(context.auth_context().get("x509_pem_cert", ()))


def _guarded(handler: Any, method: str, streams: CallerStreams) -> Any:
    component = CALLERS.get(method)

    async def check(context: Any) -> None:
        names = context.auth_context().get("x509_subject_alternative_name", ())
        if component is None or component.dns_name.encode() not in names:
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED, f"only a {component or 'member'} may call this method"
            )

    async def parse(data: bytes, context: Any) -> Any:
        try:
            return handler.request_deserializer(data)
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "these bytes are no message of this method")

    async def parse_all(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        async for data in requests:
            yield await parse(data, context)

    async def checked(request: Any, context: Any) -> Any:
        await check(context)
        return parse_all(request, context) if handler.request_streaming else await parse(request, context)

    if handler.response_streaming:
        stream = handler.stream_stream if handler.request_streaming else handler.unary_stream

        async def respond_stream(request: Any, context: Any) -> AsyncIterator[Any]:
            call = stream(await checked(request, context), context)
            with streams.count(method, caller_name(context)) as admitted:
                if not admitted:
                    await context.abort(
                        grpc.StatusCode.RESOURCE_EXHAUSTED,
                        f"this caller has {STREAMS_PER_CALLER} streams of this method; one of them must end first",
                    )
                async with aclosing(call) as messages:
                    async for message in messages:
                        yield message

        make = (
            grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
        )
        return make(respond_stream, response_serializer=handler.response_serializer)

    async def respond(request: Any, context: Any) -> Any:
        # No internal method is client-streaming.
        return await handler.unary_unary(await checked(request, context), context)

    return grpc.unary_unary_rpc_method_handler(respond, response_serializer=handler.response_serializer)
