"""Bodies in /openapi.json: routes parse them without FastAPI, so their schemas are added here."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

_REFERENCE = "#/components/schemas/{model}"


class JsonBody(dict[str, Any]):
    """The `openapi_extra` of a route with this body: its `requestBody`, as a reference into the components."""

    def __init__(self, model: type[BaseModel]) -> None:
        schema = {"$ref": _REFERENCE.format(model=model.__name__)}
        super().__init__(requestBody={"required": True, "content": {"application/json": {"schema": schema}}})
        self.model = model


def openapi_of(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of an application, built once."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes, description=app.description)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for route in app.routes:
            body = getattr(route, "openapi_extra", None)
            if isinstance(body, JsonBody):
                schema = body.model.model_json_schema(ref_template=_REFERENCE)
                schemas.update(schema.pop("$defs", {}))
                schemas[body.model.__name__] = schema
        app.openapi_schema = document
    return app.openapi_schema
