"""Reads a JSON body within its limits of bytes, time and depth."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import orjson
from fastapi import Request

from headrace_router.core.errors import BodyTooLargeError, InvalidRequestError, MediaTypeError, RequestTimeoutError
from headrace_router.core.limits import Limits
from headrace_router.text.tokenizer_pool import TokenizerPool

T = TypeVar("T")

MAX_BRACKETS = 1 << 18  # of a body, which is then parsed within a fifth of a second
SMALL_BYTES = 16 << 10  # parsed at once; larger bodies are parsed in a thread


class JsonError(InvalidRequestError, code="invalid_json"):
    """The body is not acceptable JSON."""


class BodyReader:
    """Bounds each body in bytes and in time."""

    def __init__(self, limits: Limits, pool: TokenizerPool) -> None:
        self._limits = limits
        self._pool = pool

    async def read(self, request: Request, check: Callable[[Any], T]) -> T:
        """The result of `check` for the decoded body. Raises an ApiError; ClientDisconnect when the client left."""
        _check_type(request)
        self._check_content_length(request)
        body = await self._read(request)

        def parse() -> T:
            return check(parse_json(body, self._limits.json_depth))

        if len(body) <= SMALL_BYTES:
            return parse()
        return await self._pool.run(parse, request.state.tenant.name, len(body))

    async def _read(self, request: Request) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                async for piece in request.stream():
                    if len(body) + len(piece) > self._limits.body_bytes:
                        raise self._too_large()
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


def parse_json(body: bytes, max_depth: int) -> Any:
    """The value. Refuses bad UTF-8, NaN, 1e400, half surrogates and deep nesting. Raises JsonError."""
    if not body:
        raise JsonError("The body is empty: send a JSON object.")
    if body.count(b"[") + body.count(b"{") > MAX_BRACKETS:
        raise JsonError(f"The body has more than {MAX_BRACKETS} opening brackets; send shorter lists.")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        reason = f" ({error.msg}; line {error.lineno}, column {error.colno})"
        raise JsonError(f"The body is not valid JSON{reason}.") from None
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(max_depth):
        nested = (child for entry in level for child in (entry.values() if isinstance(entry, dict) else entry))
        level = [child for child in nested if isinstance(child, (dict, list))]
        if not level:
            return value
    raise JsonError(f"The body is nested deeper than {max_depth} levels.")


def _check_type(request: Request) -> None:
    kind, _, parameters = request.headers.get("content-type", "").partition(";")
    if kind.strip().lower() != "application/json":
        raise MediaTypeError("Send the body as JSON, with the header 'Content-Type: application/json'.")
    charset = parameters.strip().lower()
    if charset.startswith("charset=") and charset[8:].strip("\" '") not in ("utf-8", "utf8"):
        raise MediaTypeError("Send the body as UTF-8.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise MediaTypeError("Send the body without a content encoding.")
