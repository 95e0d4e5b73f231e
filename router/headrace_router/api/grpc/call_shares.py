"""How many calls may be open: of one tenant, on all its connections together, and of clients without a key."""

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import grpc

from headrace_router.api.client_address import client_of_peer
from headrace_router.core.limits import TENANT_SHARE

KEYLESS_CALLS = 64  # at a time, of all clients together: for health
KEYLESS_WATCHERS = 64  # the same, of health

TENANT_SENTENCE = "this key has too many calls open at this server; end some of them first"
KEYLESS_SENTENCE = "too many calls without a key are open at this server; try again in a moment, or send a key"


class CallShares:
    """Counts open calls until their answer is sent. For one event loop."""

    def __init__(self, calls: int) -> None:
        """calls: of all tenants at a time."""
        most = max(1, int(calls * TENANT_SHARE))
        self._tenants = _OpenCalls(lambda own, total: own < most, TENANT_SENTENCE)
        self._checks = _keyless(KEYLESS_CALLS)
        self._watchers = _keyless(KEYLESS_WATCHERS)

    def limited(self, handler: Any, tenant: str) -> Any:
        """The handler of one call of a tenant, which streams its requests: refuses it beyond the share."""
        return _counted(handler, self._tenants, lambda _context: tenant)

    def limited_without_key(self, handler: Any) -> Any:
        """The same of one call without a key, by address. Calls with keys do not depend on their number."""
        calls = self._watchers if handler.response_streaming else self._checks
        return _counted(handler, calls, lambda context: client_of_peer(context.peer()))


class _OpenCalls:
    """By caller."""

    def __init__(self, allows: Callable[[int, int], bool], sentence: str) -> None:
        """allows: another call of a caller who has as many open, of as many in all. sentence: for those refused."""
        self.sentence = sentence
        self._allows = allows
        self._open: Counter[str] = Counter()
        self._total = 0

    def enter(self, caller: str) -> bool:
        """Counts a call; False = it is refused, and not counted."""
        if not self._allows(self._open[caller], self._total):
            return False
        self._open[caller] += 1
        self._total += 1
        return True

    def leave(self, caller: str) -> None:
        """A call that was counted has ended."""
        self._total -= 1
        self._open[caller] -= 1
        if not self._open[caller]:
            del self._open[caller]


def _keyless(most: int) -> _OpenCalls:
    """One address has at most as many as are free: half of them alone."""
    return _OpenCalls(lambda own, total: own < most - total, KEYLESS_SENTENCE)


def _counted(handler: Any, calls: _OpenCalls, caller_of: Callable[[Any], str]) -> Any:
    """Refuses a call with RESOURCE_EXHAUSTED when the caller has too many open. caller_of: from the call's context."""
    assert handler.request_streaming, "SmallRequestInterceptor comes after KeyInterceptor"

    async def enter(context: Any) -> None:
        caller = caller_of(context)
        if not calls.enter(caller):
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, calls.sentence)
        # A client that does not read has its call open after the method has returned.
        context.add_done_callback(lambda _context: calls.leave(caller))

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
