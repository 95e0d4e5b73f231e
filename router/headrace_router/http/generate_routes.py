"""/v1/chat/completions and /v1/completions."""

from fastapi import APIRouter, Request, Response

from headrace_router.bodies import ChatBody, CompletionBody
from headrace_router.body_errors import parse_body
from headrace_router.http.answer import Answer
from headrace_router.http.body import BodyReader
from headrace_router.http.chat_format import ChatFormat
from headrace_router.http.completion_format import CompletionFormat
from headrace_router.http.openapi import json_body
from headrace_router.services import Services


def generate_routes(services: Services) -> APIRouter:
    """Both routes; the body is read and checked here, everything after that belongs to the Answer."""
    routes = APIRouter(tags=["generation"])
    reader = BodyReader(services.config.limits, services.pool)

    @routes.post("/v1/chat/completions", summary="Answer a chat", openapi_extra=json_body(ChatBody))
    async def chat_completions(request: Request) -> Response:
        body = parse_body(ChatBody, await reader.json(request))
        tenant, label = request.state.tenant, request.state.label
        include_usage = bool(body.stream_options and body.stream_options.include_usage)
        return Answer(
            services,
            tenant,
            lambda: services.preparer.chat(body, tenant, label),
            lambda generation, ident, created: ChatFormat(
                generation,
                ident,
                created,
                logprobs=bool(body.logprobs),
                ids=bool(body.return_token_ids),
                usage=include_usage,
            ),
            stream=bool(body.stream),
            include_usage=include_usage,
        )

    @routes.post("/v1/completions", summary="Continue a text", openapi_extra=json_body(CompletionBody))
    async def completions(request: Request) -> Response:
        body = parse_body(CompletionBody, await reader.json(request))
        tenant, label = request.state.tenant, request.state.label
        include_usage = bool(body.stream_options and body.stream_options.include_usage)
        return Answer(
            services,
            tenant,
            lambda: services.preparer.completion(body, tenant, label),
            lambda generation, ident, created: CompletionFormat(
                generation,
                ident,
                created,
                logprobs=body.logprobs is not None,
                ids=bool(body.return_token_ids),
                usage=include_usage,
                echo=bool(body.echo),
            ),
            stream=bool(body.stream),
            include_usage=include_usage,
        )

    return routes
