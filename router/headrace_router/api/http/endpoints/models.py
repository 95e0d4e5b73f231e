"""GET /v1/models and /v1/models/{model}."""

from typing import Any

from fastapi import FastAPI, Response

from headrace_router.api.http.formats import json_response
from headrace_router.api.services import Services
from headrace_router.core.fleet import ServedModel


def add(app: FastAPI, services: Services) -> None:
    @app.get("/v1/models", tags=["models"], summary="List the models")
    async def models() -> Response:
        return json_response({"object": "list", "data": listed_models(services)})

    @app.get("/v1/models/{model:path}", tags=["models"], summary="Describe one model")
    async def model(model: str) -> Response:
        found = services.fleet.model(model)
        return json_response(next(entry for entry in _entries(found) if entry["id"] == model))


def listed_models(services: Services) -> list[dict[str, Any]]:
    """Every model under its name and each of its aliases."""
    return [entry for model in services.fleet.models() for entry in _entries(model)]


def _entries(model: ServedModel) -> list[dict[str, Any]]:
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
