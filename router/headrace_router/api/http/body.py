"""Reads a JSON body within its limits."""

import asyncio
from typing import Any

from fastapi import Request

from headrace_router.api.http import strict_json
from headrace_router.core.errors import BodyTooLargeError, MediaTypeError, OverloadedError, RequestTimeoutError
from headrace_router.core.limits import Limits
from headrace_router.text.tokenizer_pool import TokenizerPool

SMALL_BYTES = 64 << 10  # parsed at once; larger bodies are parsed in a thread


class BodyReader:
    """Bounds each body and all bodies being read together, in bytes and in time."""

    def __init__(self, limits: Limits, pool: TokenizerPool) -> None:
        self._limits = limits
        self._pool = pool
        self._held = 0

    async def json(self, request: Request) -> Any:
        """The decoded body. Raises an ApiError; ClientDisconnect when the client disconnected."""
        _check_type(request)
        self._check_content_length(request)
        body = await self._read(request)
        depth = self._limits.json_depth
        if len(body) <= SMALL_BYTES:
            return strict_json.parse(body, depth)
        return await self._pool.run(lambda: strict_json.parse(body, depth))

    async def _read(self, request: Request) -> bytes:
        body = bytearray()
        held = 0
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                async for piece in request.stream():
                    if len(body) + len(piece) > self._limits.body_bytes:
                        raise self._too_large()
                    if self._held + len(piece) > self._limits.total_body_bytes:
                        raise OverloadedError("Too many bodies are being read; try again in a moment.")
                    self._held += len(piece)
                    held += len(piece)
                    body += piece
        except TimeoutError:
            raise RequestTimeoutError(f"The body did not arrive within {self._limits.body_seconds:g} s.") from None
        finally:
            self._held -= held
        return bytes(body)

    def _check_content_length(self, request: Request) -> None:
        announced = request.headers.get("content-length", "")
        if announced.isdigit() and (len(announced) > 15 or int(announced) > self._limits.body_bytes):
            raise self._too_large()

    def _too_large(self) -> BodyTooLargeError:
        return BodyTooLargeError(f"The body is larger than this server's limit of {self._limits.body_bytes} bytes.")


def _check_type(request: Request) -> None:
    kind, _, parameters = request.headers.get("content-type", "").partition(";")
    if kind.strip().lower() != "application/json":
        raise MediaTypeError("Send the body as JSON, with the header 'Content-Type: application/json'.")
    charset = parameters.strip().lower()
    if charset.startswith("charset=") and charset[8:].strip("\" '") not in ("utf-8", "utf8"):
        raise MediaTypeError("Send the body as UTF-8.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise MediaTypeError("Send the body without a content encoding.")
