"""Answers a generation request over HTTP, streamed or whole, and stops all work when the client goes away."""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable

import structlog
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from headrace_router.auth import Tenant
from headrace_router.choice import ChoiceUpdate
from headrace_router.errors import ApiError
from headrace_router.generation import Generation
from headrace_router.http.formats import DONE, KEEP_ALIVE, Format, dumps, event
from headrace_router.request import GenerationRequest
from headrace_router.services import Services

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

Prepare = Callable[[], Awaitable[GenerationRequest]]
MakeFormat = Callable[[Generation, str, int], Format]

log = structlog.get_logger("headrace.router.http")


class Answer(Response):
    """Does the whole work when it is sent, so that one watcher of the connection covers every phase.

    Before the first byte an ApiError leaves this call and becomes an HTTP error; after it, an error event.
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
    ) -> None:
        super().__init__()
        self._services = services
        self._tenant = tenant
        self._prepare = prepare
        self._make_format = make_format
        self._stream = stream
        self._include_usage = include_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._respond(send))
        watch = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            gone = not work.done()
            if gone:
                work.cancel()
                await asyncio.wait({work})
                self._services.metrics.cancelled.inc()
        if not gone:
            work.result()

    async def _respond(self, send: Send) -> None:
        services = self._services
        async with services.admission.admit(self._tenant):
            request = await self._prepare()
            async with services.generation(request) as generation:
                shape = self._make_format(generation, secrets.token_hex(12), int(time.time()))
                if self._stream:
                    await self._send_stream(generation, shape, send)
                else:
                    await self._send_whole(generation, shape, send)

    async def _send_whole(self, generation: Generation, shape: Format, send: Send) -> None:
        body = dumps(shape.whole(await generation.finish(), generation))
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _send_stream(self, generation: Generation, shape: Format, send: Send) -> None:
        # Waiting for the first token before the first byte lets refusals be proper HTTP errors.
        silence = self._services.config.keep_alive_seconds
        updates = await generation.take(silence)
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        opening = b"".join(shape.head())
        try:
            await send(_part(opening + (_chunks(shape, updates) or KEEP_ALIVE)))
            while not generation.done:
                updates = await generation.take(silence)
                if updates or not generation.done:
                    await send(_part(_chunks(shape, updates) or KEEP_ALIVE))
            tail = shape.usage_chunk(generation) if self._include_usage else b""
            await send(_part(tail + DONE, last=True))
        except ApiError as error:
            self._services.metrics.failed(error.status, error.code)
            log.warning("stream ended by an error", request=generation.request.label, code=error.code)
            await send(_part(event(error.body()), last=True))


def _chunks(shape: Format, updates: list[ChoiceUpdate]) -> bytes:
    return b"".join([shape.chunk(update) for update in updates])


def _part(body: bytes, last: bool = False) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": not last}


async def _disconnected(receive: Receive) -> None:
    """Returns when the client is gone. The body was read before, so nothing else can come."""
    while (await receive())["type"] != "http.disconnect":
        pass
