"""Models, health, version, metrics and the documentation page."""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import orjson
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import RedirectResponse

from headrace_router.api.http.docs_page import DOCS_HEADERS, docs_page
from headrace_router.api.http.middleware import error_response
from headrace_router.api.http.openapi import openapi_of
from headrace_router.api.services import Services
from headrace_router.core.errors import NoReplicaError
from headrace_router.core.fleet import ServedModel

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def headrace_version() -> str:
    """The installed version, or 0 in a source tree that was never installed."""
    try:
        return version("headrace")
    except PackageNotFoundError:
        return "0"


def monitoring_routes(services: Services) -> APIRouter:
    """Health and metrics: requests to one particular router, not to any router on a shared port."""
    routes = APIRouter()

    @routes.head("/health/live", include_in_schema=False)
    @routes.get("/health/live", tags=["health"], summary="Whether the process is alive")
    async def live() -> Response:
        return _json({"status": "live"})

    @routes.head("/health/ready", include_in_schema=False)
    @routes.head("/health", include_in_schema=False)
    @routes.get("/health/ready", tags=["health"], summary="Whether requests are served")
    @routes.get("/health", tags=["health"], summary="Whether requests are served")
    async def ready() -> Response:
        if not services.ready:
            closing = services.admission.closed
            sentence = "The server is shutting down." if closing else "Not every model has a ready replica yet."
            return error_response(NoReplicaError(sentence))  # not raised: a probe is not counted as a failed request
        return _json({"status": "ready"})

    @routes.get("/metrics", tags=["server"], summary="Prometheus metrics")
    async def metrics() -> Response:
        return Response(services.metrics.text(), media_type=METRICS_TYPE)

    return routes


def info_routes(services: Services, app: FastAPI) -> APIRouter:
    """Models, version and documentation."""
    routes = APIRouter()

    def listed() -> list[dict[str, Any]]:
        return [entry for model in services.fleet.models() for entry in _entries(model)]

    def document() -> dict[str, Any]:
        return openapi_of(app) | {"x-models": listed()}

    @routes.head("/", include_in_schema=False)
    @routes.get("/", include_in_schema=False)
    async def root(request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            return RedirectResponse("/docs", headers={"cache-control": "no-store"})
        return _json(
            {"api": "/v1", "docs": "/docs", "health": "/health"}
        )  # needs no key, so it contains nothing about this server

    @routes.get("/v1/models", tags=["models"], summary="List the models")
    async def models() -> Response:
        return _json({"object": "list", "data": listed()})

    @routes.get("/v1/models/{model:path}", tags=["models"], summary="Describe one model")
    async def model(model: str) -> Response:
        found = services.fleet.model(model)
        return _json(next(entry for entry in _entries(found) if entry["id"] == model))

    @routes.get("/version", tags=["server"], summary="The version of Headrace")
    async def version_route() -> Response:
        return _json({"version": headrace_version()})

    @routes.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return _json(document())

    @routes.get("/docs", include_in_schema=False)
    async def docs(_request: Request) -> Response:
        page = docs_page(needs_key=not services.auth.open)
        return Response(page, media_type="text/html", headers=DOCS_HEADERS)

    return routes


def _entries(model: ServedModel) -> list[dict[str, Any]]:
    """The model under its name and each of its aliases."""
    return [
        {
            "id": name,
            "object": "model",
            "created": model.created,
            "owned_by": "headrace",
            "root": model.name,
            "max_model_len": model.max_model_len,
            "defaults": model.defaults,
        }
        for name in (model.name, *model.aliases)
    ]


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
