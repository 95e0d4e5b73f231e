"""/v1/chat/completions and /v1/completions."""

from fastapi import APIRouter, Request, Response

from headrace_router.api.http.body import BodyReader
from headrace_router.api.http.chat_format import ChatFormat
from headrace_router.api.http.completion_format import CompletionFormat
from headrace_router.api.http.generation_response import GenerationResponse
from headrace_router.api.http.openapi import json_body
from headrace_router.api.services import Services
from headrace_router.validation.bodies import ChatBody, CompletionBody
from headrace_router.validation.body_errors import parse_body
from headrace_router.validation.fields.ignored_fields import IgnoredFields


def generate_routes(services: Services) -> APIRouter:
    """Both routes; they read and check the body, the GenerationResponse does everything after that."""
    routes = APIRouter(tags=["generation"])
    limits = services.config.limits
    reader = BodyReader(limits, services.pool)
    ignore_unknown = services.config.unknown_fields == "ignore"

    @routes.post("/v1/chat/completions", summary="Answer a chat", openapi_extra=json_body(ChatBody))
    async def chat_completions(request: Request) -> Response:
        ignored = IgnoredFields()
        body = parse_body(ChatBody, await reader.json(request), limits, ignored if ignore_unknown else None)
        tenant, label = request.state.tenant, request.state.label
        include_usage = bool(body.stream_options and body.stream_options.include_usage)
        return GenerationResponse(
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
            headers=ignored.headers(),
        )

    @routes.post("/v1/completions", summary="Continue a text", openapi_extra=json_body(CompletionBody))
    async def completions(request: Request) -> Response:
        ignored = IgnoredFields()
        body = parse_body(CompletionBody, await reader.json(request), limits, ignored if ignore_unknown else None)
        tenant, label = request.state.tenant, request.state.label
        include_usage = bool(body.stream_options and body.stream_options.include_usage)
        return GenerationResponse(
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
            ),
            stream=bool(body.stream),
            include_usage=include_usage,
            headers=ignored.headers(),
        )

    return routes
