"""The HTTP response of a generation request, streamed or complete; stops all work when the client disconnects."""

import asyncio
import functools
import secrets
import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from headrace_router.access.auth import Tenant
from headrace_router.api.http.formats import Format
from headrace_router.api.services import Services, session_of, take
from headrace_router.core.account import Cause, TimeAccount
from headrace_router.core.errors import ApiError
from headrace_router.dispatch.choice import ChoiceUpdate
from headrace_router.dispatch.prepare import count_choices
from headrace_router.dispatch.running_request import RunningRequest
from headrace_router.validation.bodies import ChatBody, CompletionBody
from headrace_router.validation.body_errors import Body, IgnoredFields

MISS_HEADER = b"x-headrace-cache-miss"
STREAM_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

log = structlog.get_logger("headrace.router.http")


async def generation_response(
    services: Services,
    request: Request,
    check: Callable[[Any, IgnoredFields], Body],
    make_format: Callable[[Body, RunningRequest, str, int], Format],
) -> "GenerationResponse":
    """Reads and checks a body. check: makes a body of the decoded JSON, and collects the names of ignored fields.

    make_format: takes the body, the running request, an id, and unix seconds.

    Raises an ApiError; ClientDisconnect when the client disconnected.
    """
    ignored = IgnoredFields()
    body = await services.bodies.read(request, lambda value: check(value, ignored))
    return checked_response(services, request, body, functools.partial(make_format, body), ignored)


def checked_response(
    services: Services,
    request: Request,
    body: ChatBody | CompletionBody,
    make_format: Callable[[RunningRequest, str, int], Format],
    ignored: IgnoredFields,
) -> "GenerationResponse":
    """The same for a body that was checked."""
    return GenerationResponse(
        services,
        request.state.tenant,
        request.state.label,
        body,
        make_format,
        session=session_of(request.scope["headers"], services.config),
        arrived=request.state.arrived,
        write_part=request.state.write_part,
        ignored=ignored,
    )


class GenerationResponse(Response):
    """Does all work when it is sent, so that one task watches the connection in every phase.

    Before the first byte an ApiError is raised from this call and becomes an HTTP error; after it, an error event.
    """

    def __init__(
        self,
        services: Services,
        tenant: Tenant,
        label: str,
        body: ChatBody | CompletionBody,
        make_format: Callable[[RunningRequest, str, int], Format],
        *,
        session: str = "",
        arrived: float,
        write_part: Callable[[bytes], bool],
        ignored: IgnoredFields,
    ) -> None:
        """session: for placement. arrived: on the clock of time.monotonic.

        write_part: of a stream that has begun, without ASGI's messages; False if a message is needed. ignored: for a
        header of the response; errors have none.
        """
        super().__init__()
        self._services = services
        self._tenant = tenant
        self._label = label
        self._session = session
        self._arrived = arrived
        self._write_part = write_part
        self._body = body
        self._make_format = make_format
        self._ignored = ignored

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
        answer_id = secrets.token_hex(12)
        with self._services.account(self._label, answer_id, self._arrived) as account:
            await self._answer(send, answer_id, account)

    async def _answer(self, send: Send, answer_id: str, account: TimeAccount) -> None:
        services = self._services
        async with services.admission.admit(self._tenant, count_choices(self._body), self._body.priority or 0):
            account.enter(Cause.TOKENIZER, time.monotonic())
            request = await services.preparer.prepare(
                self._body, self._tenant, self._label, self._session, whole=not self._body.stream
            )
            for field in request.ignored:
                self._ignored.add(field)
            async with services.run_request(request, account) as running:
                response_format = self._make_format(running, answer_id, int(time.time()))
                if self._body.stream:
                    await self._send_stream(running, response_format, send)
                else:
                    await self._send_complete(running, response_format, send)

    async def _send_complete(self, running: RunningRequest, response_format: Format, send: Send) -> None:
        pieces = response_format.response(await running.finish(), running)
        body, complete = take(pieces)
        headers = [(b"content-type", b"application/json"), *self._more_headers(running)]
        if complete:  # else it is sent as it is made
            headers.append((b"content-length", b"%d" % len(body)))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send(_part(body, last=complete))
        while not complete:
            body, complete = await self._services.slices.next(pieces)
            await send(_part(body, last=complete))

    def _more_headers(self, running: RunningRequest) -> list[tuple[bytes, bytes]]:
        """What was ignored of the request, and why its prompt was not cached further."""
        miss = running.cache_miss
        return [*self._ignored.headers(), *([(MISS_HEADER, miss.public.encode())] if miss is not None else [])]

    async def _send_stream(self, running: RunningRequest, response_format: Format, send: Send) -> None:
        # The first byte is sent after the first token, so that refusals are proper HTTP errors.
        silence = self._services.config.keep_alive_seconds
        slices = self._services.slices

        async def send_block(block: bytes) -> None:
            if not self._write_part(block):
                await send(_part(block))

        updates = await running.take(silence)
        headers = [(b"content-type", response_format.media_type), *STREAM_HEADERS, *self._more_headers(running)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await slices.send(chain(response_format.head(), _chunks(response_format, updates)), send_block)
            while not running.done:
                updates = await running.take(silence)
                if updates or not running.done:
                    pieces = _chunks(response_format, updates)
                    block, complete = take(pieces)
                    if not (complete and self._write_part(block)):  # most tokens need no coroutine
                        await slices.send(chain((block,), pieces), send_block)
            await send(_part(response_format.tail(running), last=True))
        except ApiError as error:
            self._services.metrics.failed(error)
            log.warning("stream ended by an error", request=running.request.label, code=error.code)
            await send(_part(response_format.error(error), last=True))


def _chunks(response_format: Format, updates: list[ChoiceUpdate]) -> Iterator[bytes]:
    if not updates:
        return iter((response_format.keep_alive,))
    return chain.from_iterable(map(response_format.chunk, updates))


def _part(body: bytes, last: bool = False) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": not last}


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has disconnected. The body was read before, so no other message can arrive."""
    while (await receive())["type"] != "http.disconnect":
        pass
