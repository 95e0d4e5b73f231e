"""Reads a JSON body within its limits."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request

from headrace_router.api.body_budget import BodyShare
from headrace_router.api.http import strict_json
from headrace_router.core.errors import BodyTooLargeError, MediaTypeError, RequestTimeoutError
from headrace_router.core.limits import Limits
from headrace_router.text.tokenizer_pool import TokenizerPool

T = TypeVar("T")

SMALL_BYTES = 16 << 10  # parsed at once; larger bodies are parsed in a thread


class BodyReader:
    """Bounds each body in bytes and in time. All bodies together: `BodyBudget`."""

    def __init__(self, limits: Limits, pool: TokenizerPool) -> None:
        self._limits = limits
        self._pool = pool

    async def read(self, request: Request, share: BodyShare, check: Callable[[Any], T]) -> T:
        """The result of `check` for the decoded body, whose bytes are added to `share`.

        Raises an ApiError; ClientDisconnect when the client disconnected.
        """
        _check_type(request)
        self._check_content_length(request)
        body = await self._read(request, share)
        limits = self._limits

        def parse() -> T:
            return check(strict_json.parse(body, limits.json_depth, limits.body_values))

        return (
            parse() if len(body) <= SMALL_BYTES else await self._pool.run(parse, request.state.tenant.name, len(body))
        )

    async def _read(self, request: Request, share: BodyShare) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                async for piece in request.stream():
                    if len(body) + len(piece) > self._limits.body_bytes:
                        raise self._too_large()
                    share.add(len(piece))
                    body += piece
        except TimeoutError:
            raise RequestTimeoutError(f"The body did not arrive within {self._limits.body_seconds:g} s.") from None
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
