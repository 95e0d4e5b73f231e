"""uvicorn's connection handler with bounds, and our error object for input that is not HTTP.

An ingress stands before a public router (docs/deployment.md): these are the plain limits of the router itself. The time
of a body is bounded where it is read (`body.py`).
"""

import asyncio
import contextlib
import functools
import secrets
import socket

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headrace_router.core.errors import ApiError, InvalidRequestError, OverloadedError
from headrace_router.core.limits import Limits

HEADER_BYTES = 64  # that a header counts beside its text: short headers take more memory than bytes
PIPELINED_REQUESTS = 8  # requests of one connection that may wait for the one that is answered
SEND_BYTES = 128 << 10  # of the kernel's buffer: it takes from a slow reader in small steps, so that progress is seen
LINGER_SECONDS = 1.0  # for a client that is still sending to read why it is refused

PHRASES = {400: b"Bad Request", 431: b"Request Header Fields Too Large", 503: b"Service Unavailable"}


class HeadersTooLargeError(InvalidRequestError, status=431, code="headers_too_large"):
    """Request line and headers, or trailers, exceed the limit."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection: bounded in number, in bytes and time of a head, in time without a request, and of unread answers.

    Trailers are dropped, offers of another protocol (h2c, websocket) are ignored. The rest of a body is not read once
    its request has been answered.
    """

    limits = Limits()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._in_head = True  # from the end of one message to the end of the next one's headers
        self._undelivered_bytes = 0  # since the parser completed headers or a message, or delivered a part of a body
        self._closing = False
        self._cycles: list[RequestResponseCycle] = []  # requests that are not answered
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        if (sock := transport.get_extra_info("socket")) is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        if len(self.connections) > self.limits.connections:
            self._refuse(OverloadedError("Too many connections are open; try again in a moment."))
        else:
            self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        self._stop_timers()
        for cycle in self._cycles:  # uvicorn marks the newest one alone
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        self.close_after_response()

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        if self._in_head:
            self._start_head_timer()
        self._undelivered_bytes += len(data)
        self._unset_keepalive_if_required()
        self._parse(data)
        if self._undelivered_bytes > self.limits.header_bytes:  # the parser buffers a header until it ends
            self._refuse_headers()

    def _parse(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserError:
                self.send_400_response("")
            except httptools.HttpParserUpgrade as offer:
                # The parser has taken this for the last request, without a body: a new one gets it, and what follows.
                data = self._head_without_upgrade() + data[offer.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
                continue
            return

    def _head_without_upgrade(self) -> bytes:
        """The head that was parsed last, without the offer of another protocol (RFC 9110, section 7.8)."""
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join((*lines, b"", b""))

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= PIPELINED_REQUESTS:
            raise ValueError("too many requests wait")  # the parser stops and calls send_400_response
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else it is a trailer
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise ValueError("this is no proxy")
            return  # the same request follows (`_parse`)
        if self._head_bytes() > self.limits.header_bytes or [name for name, _ in self.headers].count(b"host") > 1:
            raise ValueError("headers")  # the parser stops and calls send_400_response
        super().on_headers_complete()
        self._in_head, self._undelivered_bytes = False, 0
        self._stop_head_timer()
        cycle = self.cycle
        self._cycles = [*(each for each in self._cycles if not each.response_complete), cycle]
        cycle.transport = _ResponseTransport(self)  # type: ignore[assignment]
        self.scope["state"]["body_is_unread"] = lambda: cycle.more_body
        self.scope["state"]["close_connection"] = self.close_after_response
        self.scope["state"]["write_part"] = functools.partial(_write_part, cycle)

    def _head_bytes(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + HEADER_BYTES for name, value in self.headers)

    def on_body(self, body: bytes) -> None:
        self._undelivered_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._in_head, self._undelivered_bytes = True, 0
            super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._closing:
            return
        super().on_response_complete()
        if self.pipeline:  # what it has sent is answered before more is read
            self.flow.pause_reading()

    def send_400_response(self, msg: str) -> None:
        if self._in_head and self._head_bytes() > self.limits.header_bytes:
            self._refuse_headers()
        else:
            self._refuse(InvalidRequestError("This is not valid HTTP."))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self._write_timer or self.loop.call_later(self.limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None and not self._closing:
            self._write_timer.cancel()
            self._write_timer = None

    def timeout_keep_alive_handler(self) -> None:
        self.close_after_response()

    def close_after_response(self) -> None:
        """Sends what is buffered, and closes; aborts if the client does not read it in `write_seconds`.

        A client that is still sending gets a moment to read the answer, and what it sends is dropped: closing a socket
        with unread bytes resets the connection.
        """
        if self._closing:
            return
        self._closing = True
        self._stop_timers()
        self._unset_keepalive_if_required()
        self._write_timer = self.loop.call_later(LINGER_SECONDS + self.limits.write_seconds, self.transport.abort)
        if self._in_head and not self._undelivered_bytes:
            self.transport.close()
            return
        self.flow.resume_reading()
        with contextlib.suppress(OSError):  # the client has disconnected
            if self.transport.can_write_eof():  # TLS cannot close one direction: the client reads to the end by length
                self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)

    @property
    def closing(self) -> bool:
        """Whether nothing more may be written."""
        return self._closing or self.transport.is_closing()

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.limits.header_seconds, self._on_head_timeout)

    def _on_head_timeout(self) -> None:
        self._head_timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False  # the answer to an earlier request is still being sent
        else:
            self.close_after_response()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_timers(self) -> None:
        self._stop_head_timer()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _refuse_headers(self) -> None:
        limit = self.limits.header_bytes
        self._refuse(HeadersTooLargeError(f"The headers are larger than this server's limit of {limit} bytes."))

    def _refuse(self, error: ApiError) -> None:
        """Answers instead of the application, and closes."""
        if self.closing:
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self._in_head or self.pipeline or self.cycle.response_started:
                self.transport.abort()  # these bytes would be read as a part of another answer
                return
        body = orjson.dumps(error.body())
        retry = b"" if error.retry_after is None else b"retry-after: %d\r\n" % error.retry_after
        self.transport.write(
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n%s"
            b"x-request-id: %s\r\n\r\n%s"
            % (error.status, PHRASES[error.status], len(body), retry, secrets.token_hex(16).encode(), body)
        )
        self.close_after_response()


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
        self.write = protocol.transport.write

    def is_closing(self) -> bool:
        return self._protocol.closing

    def close(self) -> None:
        self._protocol.close_after_response()
