"""How many calls may be open: of one tenant, on all its connections together, and of all clients without a key."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from headrace_router.core.limits import TENANT_SHARE

KEYLESS_CALLS = 64  # at a time, of all clients together: for health
KEYLESS_WATCHERS = 64  # the same, of health

TENANT_SENTENCE = "this key has too many calls open at this server; end some of them first"
KEYLESS_SENTENCE = "too many calls without a key are open at this server; try again in a moment, or send a key"


class CallShares:
    """Counts open calls until their answer is sent. For one event loop."""

    def __init__(self, calls: int) -> None:
        """calls: of all tenants at a time."""
        self._most = max(1, int(calls * TENANT_SHARE))
        self._tenants: Counter[str] = Counter()
        self._keyless: Counter[bool] = Counter()  # by whether it streams its answer

    def limited(self, handler: Any, tenant: str) -> Any:
        """The handler of one call of a tenant, which streams its requests: refuses it beyond the share."""
        return _counted(handler, self._tenants, tenant, self._most, TENANT_SENTENCE)

    def limited_without_key(self, handler: Any) -> Any:
        """The same of one call without a key. Calls with keys do not depend on their number."""
        streams = handler.response_streaming
        return _counted(
            handler, self._keyless, streams, KEYLESS_WATCHERS if streams else KEYLESS_CALLS, KEYLESS_SENTENCE
        )


def _counted(handler: Any, open_calls: Counter[Any], caller: str | bool, most: int, sentence: str) -> Any:
    """Refuses a call with RESOURCE_EXHAUSTED when the caller has as many open."""
    assert handler.request_streaming, "SmallRequestInterceptor comes after KeyInterceptor"

    def leave(_context: Any) -> None:
        open_calls[caller] -= 1
        if not open_calls[caller]:
            del open_calls[caller]

    async def enter(context: Any) -> None:
        if open_calls[caller] >= most:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, sentence)
        open_calls[caller] += 1
        context.add_done_callback(leave)  # a client that does not read has its call open after the method has returned

    async def streaming(requests: Any, context: Any) -> AsyncIterator[Any]:
        await enter(context)
        async with aclosing(handler.stream_stream(requests, context)) as responses:
            async for response in responses:
                yield response

    async def unary(requests: Any, context: Any) -> Any:
        await enter(context)
        return await handler.stream_unary(requests, context)

    form = (handler.request_deserializer, handler.response_serializer)
    if handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(streaming, *form)
    return grpc.stream_unary_rpc_method_handler(unary, *form)
