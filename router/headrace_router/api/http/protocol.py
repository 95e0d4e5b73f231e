"""uvicorn's connection handler with bounded headers, and our error object for input that is not HTTP."""

import asyncio
import secrets

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace_router.core.errors import InvalidRequestError
from headrace_router.core.limits import Limits


class HeadersTooLargeError(InvalidRequestError, status=431, code="headers_too_large"):
    """Request line and headers exceed the limit."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Request line and headers are bounded in bytes; for the first request also in time."""

    limits = Limits()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._in_head = True
        self._head_bytes = 0
        super().connection_made(transport)
        self._header_timer = self.loop.call_later(self.limits.body_seconds, self._on_header_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._header_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            # The parser buffers a header until it ends, so the bytes are counted before it gets them. Data that ends
            # the headers may also contain the beginning of a body: the limit is checked only if the headers continue.
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > self.limits.header_bytes:
            self._refuse_headers()

    def on_message_begin(self) -> None:
        self._parsed_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._parsed_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._parsed_bytes += len(name) + len(value) + 4
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._parsed_bytes > self.limits.header_bytes:
            raise ValueError("headers too large")  # the parser stops and calls send_400_response
        self._in_head = False
        self._header_timer.cancel()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head, self._head_bytes = True, 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if getattr(self, "_parsed_bytes", 0) > self.limits.header_bytes:
            self._refuse_headers()
        else:
            self._refuse(InvalidRequestError("This is not valid HTTP."), b"Bad Request")

    def _on_header_timeout(self) -> None:
        if self.transport is not None and self._in_head:
            self.transport.close()

    def _refuse_headers(self) -> None:
        limit = self.limits.header_bytes
        error = HeadersTooLargeError(f"The headers are larger than this server's limit of {limit} bytes.")
        self._refuse(error, b"Request Header Fields Too Large")

    def _refuse(self, error: InvalidRequestError, phrase: bytes) -> None:
        if self.transport.is_closing():
            return
        body = orjson.dumps(error.body())
        self.transport.write(
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n"
            b"x-request-id: %s\r\n\r\n%s" % (error.status, phrase, len(body), secrets.token_hex(16).encode(), body)
        )
        self.transport.close()


def bounded_protocol(limits: Limits) -> type[BoundedProtocol]:
    """The protocol class for uvicorn, which takes no arguments for one."""
    return type("BoundedProtocol", (BoundedProtocol,), {"limits": limits})
