"""How many calls one tenant may have open, on all its connections together, so that others can call, too."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from headrace_router.api.http.connection_counter import TENANT_SHARE

SENTENCE = "this key has too many calls open at this server; end some of them first"


class CallShares:
    """Counts the open calls of each tenant. For one event loop."""

    def __init__(self, calls: int) -> None:
        """calls: of all tenants at a time."""
        self._most = max(1, int(calls * TENANT_SHARE))
        self._open: Counter[str] = Counter()

    def limited(self, handler: Any, tenant: str) -> Any:
        """The handler of one call, which streams its requests: refuses it with RESOURCE_EXHAUSTED beyond the share."""
        form = (handler.request_deserializer, handler.response_serializer)
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(self._streaming(handler.stream_stream, tenant), *form)
        return grpc.stream_unary_rpc_method_handler(self._unary(handler.stream_unary, tenant), *form)

    def _streaming(self, method: Any, tenant: str) -> Any:
        async def call(requests: Any, context: Any) -> AsyncIterator[Any]:
            await self._enter(tenant, context)
            try:
                async with aclosing(method(requests, context)) as responses:
                    async for response in responses:
                        yield response
            finally:
                self._leave(tenant)

        return call

    def _unary(self, method: Any, tenant: str) -> Any:
        async def call(requests: Any, context: Any) -> Any:
            await self._enter(tenant, context)
            try:
                return await method(requests, context)
            finally:
                self._leave(tenant)

        return call

    async def _enter(self, tenant: str, context: Any) -> None:
        if self._open[tenant] >= self._most:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, SENTENCE)
        self._open[tenant] += 1

    def _leave(self, tenant: str) -> None:
        self._open[tenant] -= 1
        if not self._open[tenant]:
            del self._open[tenant]
