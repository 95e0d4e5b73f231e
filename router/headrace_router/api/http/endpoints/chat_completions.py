"""POST /v1/chat/completions."""

import functools

from fastapi import FastAPI, Request, Response

from headrace_router.api.http.formats import ChatFormat
from headrace_router.api.http.generation_response import generation_response
from headrace_router.api.http.openapi import JsonBody
from headrace_router.api.services import Services
from headrace_router.validation.bodies import ChatBody


def add(app: FastAPI, services: Services) -> None:
    make_format = functools.partial(ChatFormat, reasoning_field=services.config.reasoning_field)

    @app.post("/v1/chat/completions", tags=["generation"], summary="Answer a chat", openapi_extra=JsonBody(ChatBody))
    async def chat_completions(request: Request) -> Response:
        return await generation_response(services, request, ChatBody, make_format)
