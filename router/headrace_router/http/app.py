"""Puts the HTTP application together."""

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from headrace_router.errors import ApiError, InvalidRequestError, MethodNotAllowedError, NotFoundError
from headrace_router.http.formats import dumps
from headrace_router.http.generate_routes import generate_routes
from headrace_router.http.guard import Guard, error_headers
from headrace_router.http.info_routes import headrace_version, info_routes, vital_routes
from headrace_router.services import Services


def build_app(services: Services) -> ASGIApp:
    """The ASGI application of a router: the guard around the routes."""
    app = FastAPI(
        title="Headrace",
        version=headrace_version(),
        description="OpenAI-compatible API of a Headrace cluster. Unknown and unsupported fields are refused by name.",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.include_router(generate_routes(services))
    app.include_router(vital_routes(services))
    app.include_router(info_routes(services, app))
    return _guarded(app, services)


def build_vital_app(services: Services) -> ASGIApp:
    """Health and metrics alone, behind the same guard: for a router's own address beside a shared port."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.include_router(vital_routes(services))
    return _guarded(app, services)


def _guarded(app: FastAPI, services: Services) -> ASGIApp:
    async def api_error(_request: Request, error: Exception) -> Response:
        if not isinstance(error, ApiError):
            raise error
        services.metrics.failed(error.status, error.code)
        headers = {name.decode(): value.decode() for name, value in error_headers(error)}
        return Response(dumps(error.body()), error.status, headers, "application/json")

    async def routing_error(request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            raise error
        response = await api_error(request, _as_api_error(error))
        for name, value in (error.headers or {}).items():
            response.headers[name] = value  # Allow, with a 405
        return response

    async def gone(_request: Request, _error: Exception) -> Response:
        services.metrics.cancelled.inc()
        return Response(status_code=400)  # nobody is there to read it

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, routing_error)
    app.add_exception_handler(ClientDisconnect, gone)
    return Guard(app, services.auth, services.metrics)


def _as_api_error(error: HTTPException) -> ApiError:
    if error.status_code == 404:
        return NotFoundError("There is nothing at this path; GET /docs lists what there is.")
    if error.status_code == 405:
        return MethodNotAllowedError("This path does not take this method; GET /docs lists what there is.")
    refusal = InvalidRequestError(str(error.detail)[:300])
    refusal.status = error.status_code
    return refusal
