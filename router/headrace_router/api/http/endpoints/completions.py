"""POST /v1/completions."""

from fastapi import FastAPI, Request, Response

from headrace_router.api.http.formats import CompletionFormat
from headrace_router.api.http.generation_response import generation_response
from headrace_router.api.http.openapi import JsonBody
from headrace_router.api.services import Services
from headrace_router.validation.bodies import CompletionBody


def add(app: FastAPI, services: Services) -> None:
    @app.post("/v1/completions", tags=["generation"], summary="Continue a text", openapi_extra=JsonBody(CompletionBody))
    async def completions(request: Request) -> Response:
        return await generation_response(services, request, CompletionBody, CompletionFormat)
