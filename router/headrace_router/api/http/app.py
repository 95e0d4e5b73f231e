"""Builds the HTTP applications."""

from collections.abc import Sequence

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from headrace_router.access.auth import needs_local_host
from headrace_router.api.http.endpoints import ENDPOINTS, MONITORING
from headrace_router.api.http.endpoints.version import headrace_version
from headrace_router.api.http.middleware import RequestMiddleware, error_response
from headrace_router.api.services import Services
from headrace_router.core.errors import ApiError, InvalidRequestError, MethodNotAllowedError, NotFoundError


def build_app(services: Services) -> ASGIApp:
    """The ASGI application of a router: the middleware around the routes."""
    app = FastAPI(
        title="Headrace",
        version=headrace_version(),
        description="OpenAI-compatible API of a Headrace cluster. Unknown and unsupported fields are refused by name.",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    for add in ENDPOINTS:
        add(app, services)
    config = services.config
    local_only = needs_local_host(config.host, config.auth)
    return _wrapped(app, services, local_only=local_only, origins=config.allowed_origins)


def build_monitoring_app(services: Services) -> ASGIApp:
    """Health and metrics only, with the same middleware: for a router's own address."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    for add in MONITORING:
        add(app, services)
    return _wrapped(app, services, metrics_need_key=not services.config.metrics_no_auth)


def _wrapped(
    app: FastAPI,
    services: Services,
    *,
    metrics_need_key: bool = True,
    local_only: bool = False,
    origins: Sequence[str] = (),
) -> ASGIApp:
    async def api_error(_request: Request, error: Exception) -> Response:
        if not isinstance(error, ApiError):
            raise error
        services.metrics.failed(error)
        return error_response(error)

    async def routing_error(request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            raise error
        response = await api_error(request, _as_api_error(error))
        for name, value in (error.headers or {}).items():
            response.headers[name] = value  # Allow, with a 405
        return response

    async def disconnected(_request: Request, _error: Exception) -> Response:
        services.metrics.cancelled.inc()
        return Response(status_code=400)  # not sent: the client has disconnected

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, routing_error)
    app.add_exception_handler(ClientDisconnect, disconnected)
    return RequestMiddleware(
        app,
        services.auth,
        services.metrics,
        lambda: services.admission.ending,
        metrics_need_key=metrics_need_key,
        local_only=local_only,
        origins=origins,
    )


def _as_api_error(error: HTTPException) -> ApiError:
    if error.status_code == 404:
        return NotFoundError("There is nothing at this path; GET /docs lists what there is.")
    if error.status_code == 405:
        return MethodNotAllowedError("This path does not take this method; GET /docs lists what there is.")
    refusal = InvalidRequestError(str(error.detail)[:300])
    refusal.status = error.status_code
    return refusal
