"""GET /docs and /openapi.json; / links to them."""

from fastapi import FastAPI, Request, Response
from fastapi.responses import RedirectResponse

from headrace_router.api.http.docs_page import DOCS_HEADERS, docs_page
from headrace_router.api.http.endpoints.models import listed_models
from headrace_router.api.http.formats import json_response
from headrace_router.api.http.openapi import openapi_of
from headrace_router.api.services import Services


def add(app: FastAPI, services: Services) -> None:
    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def root(request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            return RedirectResponse("/docs", headers={"cache-control": "no-store"})
        # Needs no key, so it contains nothing about this server.
        return json_response({"api": "/v1", "docs": "/docs", "health": "/health"})

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return json_response(openapi_of(app) | {"x-models": listed_models(services)})

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        page = docs_page(needs_key=not services.auth.open)
        return Response(page, media_type="text/html", headers=DOCS_HEADERS)
