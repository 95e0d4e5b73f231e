"""GET /version."""

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version

from fastapi import FastAPI, Response

from headrace_router.api.http.formats import json_response
from headrace_router.api.services import Services


def add(app: FastAPI, services: Services) -> None:
    @app.get("/version", tags=["server"], summary="The version of Headrace")
    async def version_route() -> Response:
        return json_response({"version": headrace_version()})


def headrace_version() -> str:
    """The installed version, or 0 in a source tree that was never installed."""
    try:
        return installed_version("headrace")
    except PackageNotFoundError:
        return "0"
