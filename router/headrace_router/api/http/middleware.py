"""The outermost layers: request ids, origins of pages, API keys, and an OpenAI error object for every exception."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import structlog
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace_router.access.auth import Authenticator, Tenant, is_local_authority
from headrace_router.api.http.formats import dumps
from headrace_router.api.http.messages_format import messages_error
from headrace_router.api.http.ollama_format import ollama_error
from headrace_router.api.services import request_id
from headrace_router.core.errors import ApiError, AuthenticationError, HostError, InternalError
from headrace_router.dispatch.router_metrics import RouterMetrics

# The documentation is static: /openapi.json describes the API, and nothing of this server.
PUBLIC_PATHS = frozenset(
    {b"/", b"/health", b"/health/accepting", b"/health/live", b"/health/ready", b"/docs", b"/openapi.json"}
    | {b"/docs/static/" + name for name in (b"swagger-ui-bundle.js", b"swagger-ui.css", b"favicon.png")}
)
METRICS = "/metrics"
MESSAGES = "/v1/messages"
OLLAMA = "/api/"
EXPOSED_HEADERS = (
    "retry-after",
    "x-request-id",
    "x-headrace-ignored-fields",
    "x-headrace-cache-miss",
)  # that pages may read, too

log = structlog.get_logger("headrace.router.http")


class RequestMiddleware:
    """Wraps the application. The raw path decides whether a key is needed, before it is decoded or routed."""

    def __init__(
        self,
        app: ASGIApp,
        auth: Authenticator,
        metrics: RouterMetrics,
        ending: Callable[[], bool],
        *,
        metrics_need_key: bool = True,
        local_only: bool = False,
        origins: Sequence[str] = (),
    ) -> None:
        """ending: whether connections end after their next answer. `local_only`: requests whose Host header names
        another machine are refused. origins: of pages that browsers let read answers and errors.
        """
        self._app = app
        self._auth = auth
        self._metrics = metrics
        self._ending = ending
        self._metrics_need_key = metrics_need_key
        self._local_only = local_only
        self._within: ASGIApp = self._checked
        if origins:  # it answers a browser's question before a request (OPTIONS), which has no key
            self._within = CORSMiddleware(
                self._checked,
                allow_origins=origins,
                allow_methods=("GET", "HEAD", "POST"),
                allow_headers=("*",),
                allow_private_network=True,
                expose_headers=EXPOSED_HEADERS,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        label = request_id(dict(scope["headers"]).get(b"x-request-id", b"")).encode()
        last = False

        async def send_with_id(message: Message) -> None:
            nonlocal last
            if message["type"] == "http.response.start":
                state["started"] = True
                message["headers"] = [*message["headers"], (b"x-request-id", label)]
                # The rest of an unread body is not read.
                last = body_is_unread() or self._ending()
                if last:
                    message["headers"].append((b"connection", b"close"))
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body") and not last and self._ending():
                state["close_connection"]()  # the shutdown began after this answer

        state: dict[str, Any] = scope.setdefault("state", {})
        state["label"], state["arrived"] = label.decode(), time.monotonic()
        state["started"] = False
        body_is_unread = state["body_is_unread"]  # from the connection (`protocol.py`)
        await self._within(scope, receive, send_with_id)

    async def _checked(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Checks host and key; sends what the application raises as an error."""
        headers, state = dict(scope["headers"]), scope["state"]
        try:
            self._check_host(headers.get(b"host"))
            state["tenant"] = self._tenant(scope, headers)
            await self._app(scope, receive, send)
        except ApiError as error:
            if not state["started"]:
                await send_error(error, scope, send, self._metrics)
        except Exception:
            log.exception("request failed", request=state["label"])
            if not state["started"]:
                await send_error(_internal(), scope, send, self._metrics)

    def _check_host(self, host: bytes | None) -> None:
        if self._local_only and host is not None and not is_local_authority(host):
            raise HostError(
                "This server has no API keys and answers requests for localhost only: use http://127.0.0.1, or start "
                "it with --api-keys-file, or with --allow-no-auth if the network itself restricts access."
            )

    def _tenant(self, scope: Scope, headers: dict[bytes, bytes]) -> Tenant | None:
        """The tenant of the call; None for public paths and metrics. Raises AuthenticationError."""
        given = headers.get(b"authorization")
        if given is None and b"x-api-key" in headers:  # as Anthropic's clients send it
            given = b"Bearer " + headers[b"x-api-key"]
        if sum(name == b"authorization" for name, _ in scope["headers"]) > 1:
            raise AuthenticationError("Send the header Authorization once: it is not known which one counts.")
        if scope["path"] == METRICS:  # the decoded path, as it is routed: every spelling of this path has the same rule
            if self._metrics_need_key and not self._auth.may_read_metrics(given):
                raise AuthenticationError("Send a key for metrics in the header 'Authorization: Bearer KEY'.")
            return None
        tenant = self._auth.tenant(given)
        if tenant is None and scope.get("raw_path") not in PUBLIC_PATHS:
            where = "the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            raise AuthenticationError(f"Send a valid API key in {where}.")
        return tenant


def _internal() -> InternalError:
    return InternalError("The server failed on this request; its log has the details, under the request's id.")


def error_headers(error: ApiError) -> list[tuple[bytes, bytes]]:
    """The headers of an error, without the content type."""
    headers: list[tuple[bytes, bytes]] = []
    if error.retry_after is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


# How other APIs call the fields of chats.
_NAMES = {
    MESSAGES: {"stop": "stop_sequences", "response_format": "output_config.format"},
    "/v1/responses": {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"},
    OLLAMA: {
        "max_tokens": "options.num_predict",
        "repetition_penalty": "options.repeat_penalty",
        "response_format": "format",
        **{name: f"options.{name}" for name in ("temperature", "top_p", "top_k", "min_p", "seed", "stop")},
    },
}


def error_body(error: ApiError, path: str, request_id: str) -> bytes:
    """The error object of the API that the path belongs to."""
    for start, names in _NAMES.items():
        if path.startswith(start):
            error = error.renamed(names)
    if path.startswith(MESSAGES):
        return dumps(messages_error(error, request_id))
    return dumps(ollama_error(error) if path.startswith(OLLAMA) else error.body())


def error_response(error: ApiError, path: str = "", request_id: str = "") -> Response:
    """An error as a response. It is not counted in the metrics: the code that refuses a request counts it."""
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    return Response(error_body(error, path, request_id), error.status, headers, "application/json")


async def send_error(error: ApiError, scope: Scope, send: Send, metrics: RouterMetrics) -> None:
    """Sends an error as a complete response."""
    metrics.failed(error)
    body = error_body(error, scope["path"], scope["state"]["label"])
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *error_headers(error)]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
