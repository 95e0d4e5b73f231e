"""The outermost layer: request ids, keys, and an OpenAI error object for whatever goes wrong further in."""

import re
import secrets
from typing import Any

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace_router.auth import Authenticator
from headrace_router.errors import ApiError, AuthenticationError, InternalError
from headrace_router.http.formats import dumps
from headrace_router.router_metrics import RouterMetrics

KEYLESS = frozenset({b"/health", b"/health/live", b"/health/ready"})
_SANE_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")

log = structlog.get_logger("headrace.router.http")


class Guard:
    """Wraps the application. The key decision looks at the raw path only, before anything decodes or routes it (R3)."""

    def __init__(self, app: ASGIApp, auth: Authenticator, metrics: RouterMetrics) -> None:
        self._app = app
        self._auth = auth
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        label = given if _SANE_ID.fullmatch(given) else secrets.token_hex(16).encode()
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], (b"x-request-id", label)]
            await send(message)

        state: dict[str, Any] = scope.setdefault("state", {})
        state["label"] = label.decode()
        try:
            state["tenant"] = self._tenant(scope, headers)
            await self._app(scope, receive, send_with_id)
        except ApiError as error:
            if not started:
                await send_error(error, send_with_id, self._metrics)
        except Exception:
            log.exception("request failed", request=state["label"])
            if not started:
                await send_error(_internal(), send_with_id, self._metrics)

    def _tenant(self, scope: Scope, headers: dict[bytes, bytes]) -> Any:
        tenant = self._auth.tenant(headers.get(b"authorization"))
        if tenant is None and scope.get("raw_path") not in KEYLESS:
            raise AuthenticationError("Send a valid API key in the header 'Authorization: Bearer KEY'.")
        return tenant


def _internal() -> InternalError:
    return InternalError("The server failed on this request; its log tells more, under the request's id.")


def error_headers(error: ApiError) -> list[tuple[bytes, bytes]]:
    """The headers that belong to an error, the body's type aside."""
    headers: list[tuple[bytes, bytes]] = []
    if error.retry_after is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


async def send_error(error: ApiError, send: Send, metrics: RouterMetrics) -> None:
    """Sends an error as a whole response."""
    metrics.failed(error.status, error.code)
    body = dumps(error.body())
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *error_headers(error)]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
