"""The HTTP response of a generation request, streamed or complete; stops all work when the client disconnects."""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence

import structlog
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from headrace_router.access.auth import Tenant
from headrace_router.api.http.formats import DONE, KEEP_ALIVE, Format, dumps, event
from headrace_router.api.services import Services
from headrace_router.core.errors import ApiError
from headrace_router.dispatch.choice import ChoiceUpdate
from headrace_router.dispatch.generation import Generation
from headrace_router.dispatch.request import GenerationRequest

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

Headers = Sequence[tuple[bytes, bytes]]
Prepare = Callable[[], Awaitable[GenerationRequest]]
MakeFormat = Callable[[Generation, str, int], Format]

log = structlog.get_logger("headrace.router.http")


class GenerationResponse(Response):
    """Does all work when it is sent, so that one task watches the connection in every phase.

    Before the first byte an ApiError is raised from this call and becomes an HTTP error; after it, an error event.
    """

    def __init__(
        self,
        services: Services,
        tenant: Tenant,
        prepare: Prepare,
        make_format: MakeFormat,
        *,
        stream: bool,
        include_usage: bool,
        headers: Headers = (),
    ) -> None:
        """headers: added to the response's own; not to an error's."""
        super().__init__()
        self._services = services
        self._tenant = tenant
        self._prepare = prepare
        self._make_format = make_format
        self._stream = stream
        self._include_usage = include_usage
        self._extra_headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._respond(send))
        watch = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            disconnected = not work.done()
            if disconnected:
                work.cancel()
                await asyncio.wait({work})
                self._services.metrics.cancelled.inc()
        if not disconnected:
            work.result()

    async def _respond(self, send: Send) -> None:
        services = self._services
        async with services.admission.admit(self._tenant):
            request = await self._prepare()
            async with services.generation(request) as generation:
                response_format = self._make_format(generation, secrets.token_hex(12), int(time.time()))
                if self._stream:
                    await self._send_stream(generation, response_format, send)
                else:
                    await self._send_complete(generation, response_format, send)

    async def _send_complete(self, generation: Generation, response_format: Format, send: Send) -> None:
        body = dumps(response_format.response_object(await generation.finish(), generation))
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": [*headers, *self._extra_headers]})
        await send({"type": "http.response.body", "body": body})

    async def _send_stream(self, generation: Generation, response_format: Format, send: Send) -> None:
        # The first byte is sent after the first token, so that refusals are proper HTTP errors.
        silence = self._services.config.keep_alive_seconds
        updates = await generation.take(silence)
        await send({"type": "http.response.start", "status": 200, "headers": [*STREAM_HEADERS, *self._extra_headers]})
        opening = b"".join(response_format.head())
        try:
            await send(_part(opening + (_chunks(response_format, updates) or KEEP_ALIVE)))
            while not generation.done:
                updates = await generation.take(silence)
                if updates or not generation.done:
                    await send(_part(_chunks(response_format, updates) or KEEP_ALIVE))
            tail = response_format.usage_chunk(generation) if self._include_usage else b""
            await send(_part(tail + DONE, last=True))
        except ApiError as error:
            self._services.metrics.failed(error.status, error.code)
            log.warning("stream ended by an error", request=generation.request.label, code=error.code)
            await send(_part(event(error.body()), last=True))


def _chunks(response_format: Format, updates: list[ChoiceUpdate]) -> bytes:
    return b"".join([response_format.chunk(update) for update in updates])


def _part(body: bytes, last: bool = False) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": not last}


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has disconnected. The body was read before, so no other message can arrive."""
    while (await receive())["type"] != "http.disconnect":
        pass
