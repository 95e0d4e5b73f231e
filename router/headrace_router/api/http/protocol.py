"""uvicorn's connection handler with bounds, and our error object for input that is not HTTP."""

import asyncio
import functools
import secrets
from typing import Any

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headrace_router.api.http.connection_counter import ConnectionCounter, Place
from headrace_router.api.http.read_pacer import PacedConnection
from headrace_router.api.http.request_head import use_one_host, without_upgrade
from headrace_router.api.http.write_watch import WriteWatch
from headrace_router.core.errors import ApiError, InvalidRequestError, OverloadedError
from headrace_router.core.limits import Limits

HEADER_BYTES = 64  # that a header counts beside its text: short ones take more memory than bytes
PIPELINED_REQUESTS = 8  # that wait on one connection
LINGER_SECONDS = 1.0  # for a client to stop sending and to read the reason
REFUSED_CONNECTIONS = 256  # above the limit that get a reason at a time; more are closed without

PHRASES = {400: b"Bad Request", 431: b"Request Header Fields Too Large", 503: b"Service Unavailable"}


class HeadersTooLargeError(InvalidRequestError, status=431, code="headers_too_large"):
    """Request line and headers, or trailers, exceed the limit."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Every request's line, headers and trailers are bounded in bytes, its line and headers in time.

    Trailers are counted and dropped, offers of another protocol (h2c, websocket) are ignored. The rest of a body is not
    read once its request has been answered. The time of a body is bounded where it is read (`body.py`), the
    time between requests by uvicorn.
    """

    limits = Limits()
    counter = ConnectionCounter(limits.connections, limits.connections_per_address)

    def connection_made(self, transport: asyncio.Transport, paced: PacedConnection) -> None:  # type: ignore[override]
        """paced: what the client sends arrives through it."""
        self._paced = paced
        self._in_head = True  # from the end of one message to the end of the next one's headers
        self._parsed_bytes = 0  # of this line and headers, or of these trailers
        self._undelivered_bytes = 0  # since the parser completed headers or a message, or delivered a part of a body
        self._closing = False
        self._cycles: list[RequestResponseCycle] = []  # requests that are not answered
        self._tenant: str | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self.written = WriteWatch(transport, self.limits.write_seconds)
        self._place: Place | None = None
        super().connection_made(transport)
        self._place = self.counter.add(self._address, self._abort)
        if self._place is not None:
            self._start_head_timer()
        elif len(self.connections) <= self.limits.connections + REFUSED_CONNECTIONS:
            self._refuse(OverloadedError("Too many connections are open; try again in a moment."))
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._place is not None:
            self._place.release()
        self.counter.unassign(self._tenant)
        self._tenant = None
        self._closing = True
        self._stop_timers()
        self.written.stop()
        for cycle in self._cycles:  # uvicorn marks the newest one alone
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._cycles.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._paced.progressed()
        if self._closing:
            return
        if self._in_head:
            self._start_head_timer()
        # The parser buffers a header until it ends, so the bytes are counted before it gets them. Data that ends the
        # headers may also contain the beginning of a body: only what comes after that data counts from then on.
        self._undelivered_bytes += len(data)
        self._unset_keepalive_if_required()
        self._parse(data)
        if self._undelivered_bytes > self.limits.header_bytes:
            self._refuse_headers()

    def _parse(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserError:
                self.send_400_response("")
            except httptools.HttpParserUpgrade as offer:
                # The parser has taken this for the last request, without a body: a new one gets it, and what follows.
                data = without_upgrade(self.parser, self.url, self.headers) + data[offer.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
                continue
            return

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= PIPELINED_REQUESTS:
            raise ValueError("too many requests on one connection")
        self._parsed_bytes = 0
        self._start_head_timer()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + HEADER_BYTES)
        if self._in_head:  # else it is a trailer
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise ValueError("this is no proxy")
            return  # the same request follows (`_parse`)
        use_one_host(self.url, self.headers)
        super().on_headers_complete()
        self._in_head, self._parsed_bytes, self._undelivered_bytes = False, 0, 0
        self._stop_timers()
        cycle = self.cycle
        self._cycles = [*(each for each in self._cycles if not each.response_complete), cycle]
        cycle.transport = _ResponseTransport(self)  # type: ignore[assignment]
        self.scope["state"]["body_is_unread"] = lambda: cycle.more_body
        self.scope["state"]["assign_connection"] = self._assign
        self.scope["state"]["close_connection"] = self.close_after_response
        self.scope["state"]["write_part"] = functools.partial(_write_part, cycle)

    def on_body(self, body: bytes) -> None:
        self._undelivered_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_head, self._undelivered_bytes = True, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._paced.submit(self._continue)  # the next request of this connection begins in its turn
        else:
            self._continue()

    def _continue(self) -> None:
        if not self._closing:
            super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        if self._parsed_bytes > self.limits.header_bytes:
            self._refuse_headers()
        else:
            self._refuse(InvalidRequestError("This is not valid HTTP."))

    @property
    def closing(self) -> bool:
        """Whether nothing more may be written."""
        return self._closing or self.transport.is_closing()

    def close_after_response(self, *, refused: bool = False) -> None:
        """Sends what is buffered, and closes.

        A client that is still sending gets a moment to read the answer, and what it sends is dropped: closing a socket
        with unread bytes resets the connection.
        """
        if self.closing:
            return
        self._closing = True
        self._stop_timers()
        self._unset_keepalive_if_required()
        if refused or not self._in_head:
            self._linger()
        else:
            self.transport.close()

    def _abort(self) -> None:
        """Another connection gets its place."""
        self._closing = True  # what waits to be read is not served
        self.transport.abort()

    def _linger(self) -> None:
        try:
            if self.transport.can_write_eof():  # TLS cannot close one direction: the client reads to the end by length
                self.transport.write_eof()
        except OSError:  # the client has disconnected
            self.transport.abort()
            return
        self.flow.resume_reading()
        self._linger_timer = self.loop.call_later(LINGER_SECONDS, self.transport.close)

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    def _assign(self, tenant: str | None) -> bool:
        """The client may call: with the key of a tenant; None = the server has no keys.

        False = the tenant has more than its share of the connections.
        """
        self._paced.assign(tenant)
        if self._place is not None:
            self._place.keep()
        if self._closing or tenant is None:
            return True
        previous, self._tenant = self._tenant, tenant
        return self.counter.assign(tenant, previous)

    def _count(self, size: int) -> None:
        self._parsed_bytes += size
        if self._parsed_bytes > self.limits.header_bytes:
            raise ValueError("headers too large")  # the parser stops and calls send_400_response

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.limits.header_seconds, self._on_head_timeout)

    def _stop_timers(self) -> None:
        for timer in (self._head_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._linger_timer = None

    def _on_head_timeout(self) -> None:
        self._head_timer = None
        if self._answering:
            self.cycle.keep_alive = False  # the answer to an earlier request is still being sent
        else:
            self.transport.close()

    @property
    def _answering(self) -> bool:
        """Whether a response is due, or being sent."""
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse_headers(self) -> None:
        limit = self.limits.header_bytes
        self._refuse(HeadersTooLargeError(f"The headers are larger than this server's limit of {limit} bytes."))

    def _refuse(self, error: ApiError) -> None:
        """Answers instead of the application, and closes."""
        if self.closing:
            return
        own = not self._in_head and not self.pipeline and self._answering and not self.cycle.response_started
        if self._answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self._answering and not own:
            self.transport.abort()  # these bytes would be read as a part of another answer
            return
        body = orjson.dumps(error.body())
        retry = b"" if error.retry_after is None else b"retry-after: %d\r\n" % error.retry_after
        self.written.write(
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n%s"
            b"x-request-id: %s\r\n\r\n%s"
            % (error.status, PHRASES[error.status], len(body), retry, secrets.token_hex(16).encode(), body)
        )
        self.close_after_response(refused=True)


def _write_part(cycle: RequestResponseCycle, body: bytes) -> bool:
    """Writes a part of a chunked body; False if it must be sent as ASGI's message: it has to wait, or is the first.

    A token costs about a tenth less than through the coroutines of each layer.
    """
    if cycle.flow.write_paused or cycle.disconnected or not cycle.response_started or cycle.response_complete:
        return False
    if not cycle.chunked_encoding or not body:
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
    return True


class _ResponseTransport:
    """What a response is written to; closing it lets the client read the response first."""

    def __init__(self, protocol: BoundedProtocol) -> None:
        self._protocol = protocol
        self.write = protocol.written.write

    def is_closing(self) -> bool:
        return self._protocol.closing

    def close(self) -> None:
        self._protocol.close_after_response()


def bounded_protocol(limits: Limits) -> type[BoundedProtocol]:
    """The protocol class for uvicorn, which takes no arguments for one."""
    counter = ConnectionCounter(limits.connections, limits.connections_per_address)
    own: dict[str, Any] = {"limits": limits, "counter": counter}
    return type("BoundedProtocol", (BoundedProtocol,), own)
