"""Bodies in /openapi.json: routes parse them without FastAPI, so their schemas are added here."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from headrace_router.validation.bodies import ChatBody, CompletionBody

_REFERENCE = "#/components/schemas/{model}"


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """The `requestBody` of a route, as a reference into the components."""
    schema = {"$ref": _REFERENCE.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def openapi_of(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of an application, built once."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes, description=app.description)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for model in (ChatBody, CompletionBody):
            schema = model.model_json_schema(ref_template=_REFERENCE)
            schemas.update(schema.pop("$defs", {}))
            schemas[model.__name__] = schema
        app.openapi_schema = document
    return app.openapi_schema
