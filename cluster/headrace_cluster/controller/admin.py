"""The admin HTTP API: status, stop, operations on replicas. Own port and keys, on loopback by default."""

import hmac
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import msgspec
import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace_base.errors import HeadraceError, ListenError
from headrace_cluster.controller.operations import Operation
from headrace_router.access.tls_files import TlsFiles
from headrace_router.api.http.http_server import http_config
from headrace_router.core.limits import Limits

ADMIN_LIMITS = Limits(connections=128, header_seconds=1, idle_seconds=5)  # limits for a few clients of one operator

_HOSTS = {"127.0.0.1", "localhost", "[::1]"}


class Guard:
    """Accepts a request only with a key and, on loopback, a Host that is this machine (DNS rebinding)."""

    def __init__(self, app: ASGIApp, keys: Callable[[], Iterable[bytes]], local: bool) -> None:
        self._app = app
        self._keys = keys
        self._local = local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. Only HTTP is accepted; the request of an unauthenticated client is not parsed."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        keys = [value for name, value in scope["headers"] if name == b"authorization"]
        if self._local and (len(hosts) != 1 or _without_port(hosts[0]) not in _HOSTS):
            response: Response = _error(403, "this Host is not served: use 127.0.0.1 or localhost")
        elif len(keys) != 1 or not any([hmac.compare_digest(keys[0], b"Bearer " + key) for key in self._keys()]):
            response = _error(401, "the admin key is missing or wrong")
        else:
            await self._app(scope, receive, send)
            return
        response.headers["connection"] = "close"  # the rest of its body is not read
        await response(scope, receive, send)


def admin_app(
    keys: Callable[[], Iterable[bytes]],
    documents: Mapping[str, Callable[[], Any]],
    stop: Callable[[], None],
    operations: Iterable[Operation],
    local: bool = True,
) -> ASGIApp:
    """Documents by the path of their GET. POST /stop begins an orderly stop and returns at once.

    keys: those that are valid now. local: for clients on this machine alone. Each operation is a POST of its own.
    """

    def get(document: Callable[[], Any]) -> Callable[[Request], Awaitable[Response]]:
        async def respond(_request: Request) -> Response:
            return Response(msgspec.json.encode(document()), media_type="application/json")

        return respond

    async def post_stop(_request: Request) -> Response:
        stop()
        return JSONResponse({"stopping": True}, status_code=202)

    async def refuse(_request: Request, error: Exception) -> Response:
        code = error.status_code if isinstance(error, HTTPException) else 500
        return _error(code, {404: "there is no such path", 405: "this path has another method"}.get(code, "failed"))

    routes = [
        *(Route(path, get(document)) for path, document in documents.items()),
        Route("/stop", post_stop, methods=["POST"]),
        *(Route(operation.path, _post(operation), methods=["POST"]) for operation in operations),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: refuse, Exception: refuse})
    return Guard(app, keys, local)


def _post(operation: Operation) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request) -> Response:
        try:
            body = operation.body.model_validate_json(await request.body() or b"{}")
        except ValidationError as error:
            entry = error.errors(include_url=False)[0]
            return _error(400, f"{'.'.join(map(str, entry['loc'])) or 'the body'}: {entry['msg'].lower()}")
        try:
            return JSONResponse(await operation.run(body))
        except HeadraceError as error:
            return _error(409, str(error))

    return respond


def listen(host: str, port: int, *, reserved: bool = False, flag: str = "--admin-port") -> socket.socket:
    """A bound socket. reserved: by the process that started this one; else no other server can share the port.

    Raises ListenError.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT if reserved else socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ListenError(f"port {port} on {host} is in use; choose another with {flag}") from error
    return bound


def admin_server(app: ASGIApp, tls: TlsFiles | None = None, limits: Limits = ADMIN_LIMITS) -> uvicorn.Server:
    """A server for one small API: no access log, no lifespan, short keep-alive. tls: None = plain HTTP."""
    context = None if tls is None else tls.monitoring_context
    return uvicorn.Server(http_config(app, limits, context, stop_seconds=1))


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name.lower() if colon and port.isdigit() else host.lower()


def _error(code: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "admin_error", "code": code}}, status_code=code)
