"""The HTTP applications: endpoints, their documentation, and an OpenAI error object for what goes wrong."""

import functools
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import RedirectResponse
from fastapi_offline import FastAPIOffline
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from headrace_router.access.auth import needs_local_host
from headrace_router.api.http.formats import ChatFormat, CompletionFormat, json_response
from headrace_router.api.http.generation_response import checked_response, generation_response
from headrace_router.api.http.messages_format import MessagesFormat
from headrace_router.api.http.middleware import RequestMiddleware, error_response
from headrace_router.api.http.ollama_format import VERSION, OllamaFormat, loaded, shown, tags
from headrace_router.api.http.responses_format import ResponsesFormat
from headrace_router.api.services import Services
from headrace_router.core.errors import (
    ApiError,
    InvalidRequestError,
    MethodNotAllowedError,
    NoReplicaError,
    NotFoundError,
)
from headrace_router.core.fleet import ServedModel
from headrace_router.validation.bodies import ChatBody, CompletionBody
from headrace_router.validation.body_errors import IgnoredFields, parse_body
from headrace_router.validation.messages_body import MessagesBody, parse_messages
from headrace_router.validation.ollama_body import OllamaBody, model_name, parse_ollama
from headrace_router.validation.responses_body import ResponsesBody, parse_responses
from headrace_router.validation.token_bodies import DetokenizeBody, TokenizeBody, parse_detokenize, parse_tokenize

_STOPPING = "The server is shutting down."
_REFERENCE = "#/components/schemas/{model}"


def build_app(services: Services) -> ASGIApp:
    """The ASGI application of a router: the middleware around the routes."""
    app = FastAPIOffline(
        redoc_url=None,
        static_url="/docs/static",
        title="Headrace",
        version=headrace_version(),
        description="OpenAI-compatible API of a Headrace cluster. Unknown and unsupported fields are refused by name.",
        redirect_slashes=False,
    )
    app.openapi = functools.partial(_openapi, app)  # type: ignore[method-assign]
    add_generation(app, services)
    add_tokens(app, services)
    add_ollama(app, services)
    add_server(app, services)
    add_health(app, services)
    config = services.config
    local_only = needs_local_host(config.host, config.auth)
    return _wrapped(app, services, local_only=local_only, origins=config.allowed_origins)


def build_monitoring_app(services: Services) -> ASGIApp:
    """Health and metrics of this one router, with the same middleware: for an address of its own."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    add_health(app, services)
    return _wrapped(app, services, metrics_need_key=not services.config.metrics_no_auth)


def add_generation(app: FastAPI, services: Services) -> None:
    """Chats, completions, and their views for agents: Responses, Messages."""
    config = services.config
    chat_format = functools.partial(ChatFormat, reasoning_field=config.reasoning_field)

    def chat_body(value: Any, ignored: IgnoredFields) -> ChatBody:
        return parse_body(ChatBody, value, config.limits, ignored if config.unknown_fields == "ignore" else None)

    def completion_body(value: Any, ignored: IgnoredFields) -> CompletionBody:
        return parse_body(CompletionBody, value, config.limits, ignored if config.unknown_fields == "ignore" else None)

    @app.post("/v1/chat/completions", tags=["generation"], summary="Answer a chat", openapi_extra=JsonBody(ChatBody))
    async def chat_completions(request: Request) -> Response:
        return await generation_response(services, request, chat_body, chat_format)

    @app.post("/v1/completions", tags=["generation"], summary="Continue a text", openapi_extra=JsonBody(CompletionBody))
    async def completions(request: Request) -> Response:
        return await generation_response(services, request, completion_body, CompletionFormat)

    @app.post("/v1/messages", tags=["generation"], summary="Answer messages", openapi_extra=JsonBody(MessagesBody))
    async def messages(request: Request) -> Response:
        """As in Anthropic's Messages API, without state."""
        ignored = IgnoredFields()
        chat, previous = await services.bodies.read(
            request, lambda value: parse_messages(value, config.limits, ignored)
        )
        make_format = functools.partial(MessagesFormat, chat, previous=previous)
        return checked_response(services, request, chat, make_format, ignored)

    @app.post("/v1/responses", tags=["generation"], summary="Answer items", openapi_extra=JsonBody(ResponsesBody))
    async def responses(request: Request) -> Response:
        """As in OpenAI's Responses API, without state."""
        ignored = IgnoredFields()
        chat, echo = await services.bodies.read(request, lambda value: parse_responses(value, config.limits, ignored))
        return checked_response(services, request, chat, functools.partial(ResponsesFormat, chat, echo), ignored)

    @app.post(
        "/v1/messages/count_tokens",
        tags=["generation"],
        summary="Count the tokens of messages",
        openapi_extra=JsonBody(MessagesBody),
    )
    async def count_tokens(request: Request) -> Response:
        body, _ = await services.bodies.read(
            request, lambda value: parse_messages(value, config.limits, IgnoredFields(), counting=True)
        )
        _, token_ids = await services.preparer.tokenize(body, request.state.tenant)
        return json_response({"input_tokens": len(token_ids)})


def add_tokens(app: FastAPI, services: Services) -> None:
    """Text to tokens, and back."""

    def only_model() -> str | None:
        """Where one model is served, it need not be named."""
        models = services.fleet.models()
        return models[0].name if len(models) == 1 else None

    @app.post("/tokenize", tags=["tokens"], summary="Tokens of a text or a chat", openapi_extra=JsonBody(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        limits, model = services.config.limits, only_model()  # large bodies are parsed in a thread
        body, strings = await services.bodies.read(request, lambda value: parse_tokenize(value, limits, model))
        card, ids = await services.preparer.tokenize(body, request.state.tenant)
        named = card.token_strings(ids) if strings else None
        found = {"count": len(ids), "max_model_len": card.max_model_len, "tokens": ids, "token_strs": named}
        return json_response(found)

    @app.post("/detokenize", tags=["tokens"], summary="The text of tokens", openapi_extra=JsonBody(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        model = only_model()
        body = await services.bodies.read(request, lambda value: parse_detokenize(value, model))
        return json_response({"prompt": await services.preparer.detokenize(body, request.state.tenant)})


def add_ollama(app: FastAPI, services: Services) -> None:
    """Ollama's API, for editors that speak nothing else."""

    async def answer(request: Request, *, chat: bool) -> Response:
        ignored = IgnoredFields()
        body = await services.bodies.read(request, lambda value: parse_ollama(value, services.config.limits, ignored))
        if isinstance(body, str):
            services.fleet.model(body)
            return json_response(loaded(body, chat=chat))
        make_format = functools.partial(OllamaFormat, body, chat=chat)
        return checked_response(services, request, body, make_format, ignored)

    @app.post("/api/chat", tags=["ollama"], summary="Answer a chat", openapi_extra=JsonBody(OllamaBody))
    async def chat(request: Request) -> Response:
        return await answer(request, chat=True)

    @app.post("/api/generate", tags=["ollama"], summary="Answer a prompt", openapi_extra=JsonBody(OllamaBody))
    async def generate(request: Request) -> Response:
        return await answer(request, chat=False)

    @app.get("/api/tags", tags=["ollama"], summary="List the models")
    async def listed() -> Response:
        return json_response(tags(services.fleet.models()))

    @app.post("/api/show", tags=["ollama"], summary="Describe one model", openapi_extra=JsonBody(OllamaBody))
    async def show(request: Request) -> Response:
        name = await services.bodies.read(request, model_name)
        return json_response(shown(services.fleet.model(name), services.fleet.card(name)))

    @app.get("/api/version", tags=["ollama"], summary="The version of Ollama whose API this is")
    async def ollama_version() -> Response:
        return json_response({"version": VERSION})


def add_server(app: FastAPI, services: Services) -> None:
    """The models, and the server itself."""

    @app.get("/v1/models", tags=["models"], summary="List the models")
    async def models() -> Response:
        listed = [_entry(model, name) for model in services.fleet.models() for name in model.names]
        return json_response({"object": "list", "data": listed})

    @app.get("/v1/models/{model:path}", tags=["models"], summary="Describe one model")
    async def model(model: str) -> Response:
        found = services.fleet.model(model)
        return json_response(_entry(found, model))

    @app.get("/version", tags=["server"], summary="The version of Headrace")
    async def version_route() -> Response:
        return json_response({"version": headrace_version()})

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def root(request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            return RedirectResponse("/docs", headers={"cache-control": "no-store"})
        # Needs no key, so it contains nothing about this server.
        return json_response({"api": "/v1", "docs": "/docs", "health": "/health"})


def add_health(app: FastAPI, services: Services) -> None:
    """Health and metrics: of one particular router, not of any router on a shared port."""

    @app.get("/metrics", tags=["server"], summary="Prometheus metrics")
    async def metrics(request: Request) -> Response:
        given = request.headers
        page, headers = await services.metrics.page(given.get("accept", ""), given.get("accept-encoding", ""))
        return Response(page, headers=headers)

    @app.head("/health/live", include_in_schema=False)
    @app.get("/health/live", tags=["health"], summary="Whether the process is alive")
    async def live() -> Response:
        return json_response({"status": "live"})

    @app.head("/health/accepting", include_in_schema=False)
    @app.get("/health/accepting", tags=["health"], summary="Whether requests get an answer, if only 503")
    async def accepting() -> Response:
        """Also while no replica is ready: clients of a load balancer then get 503 with Retry-After."""
        if not services.accepting:
            closing = services.admission.ending
            sentence = _STOPPING if closing else "The controller has sent no list of replicas yet."
            return error_response(NoReplicaError(sentence))
        return json_response({"status": "accepting"})

    @app.head("/health/ready", include_in_schema=False)
    @app.head("/health", include_in_schema=False)
    @app.get("/health/ready", tags=["health"], summary="Whether requests are served")
    @app.get("/health", tags=["health"], summary="Whether requests are served")
    async def ready(model: str | None = None) -> Response:
        """With `model`: whether requests for this model are served; a model without replicas is not ready alone."""
        if not services.ready or (model is not None and not services.fleet.model_ready(model)):
            closing = services.admission.ending
            missing = "No model has a ready replica yet." if model is None else "The model has no ready replica."
            sentence = _STOPPING if closing else missing
            return error_response(NoReplicaError(sentence))  # not raised: a probe is not counted as a failed request
        return json_response({"status": "ready"})


def _entry(model: ServedModel, name: str) -> dict[str, Any]:
    """name: its own, or an alias."""
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "headrace",
        "root": model.name,
        "max_model_len": model.max_model_len,
        "defaults": model.defaults,
    }


def headrace_version() -> str:
    """The installed version, or 0 in a source tree that was never installed."""
    try:
        return version("headrace")
    except PackageNotFoundError:
        return "0"


class JsonBody(dict[str, Any]):
    """The `openapi_extra` of a route with this body: its `requestBody`, as a reference into the components."""

    def __init__(self, model: type[BaseModel]) -> None:
        schema = {"$ref": _REFERENCE.format(model=model.__name__)}
        super().__init__(requestBody={"required": True, "content": {"application/json": {"schema": schema}}})
        self.model = model


def _openapi(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, built once. Routes parse bodies without FastAPI, so their schemas are added here."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes, description=app.description)
        components = document.setdefault("components", {})
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer", "description": "an API key"}}
        document["security"] = [{}, {"key": []}]  # `Authorize` on /docs asks for it
        schemas = components.setdefault("schemas", {})
        for route in app.routes:
            body = getattr(route, "openapi_extra", None)
            if isinstance(body, JsonBody):
                schema = body.model.model_json_schema(ref_template=_REFERENCE)
                schemas.update(schema.pop("$defs", {}))
                schemas[body.model.__name__] = schema
        app.openapi_schema = document
    return app.openapi_schema


def _wrapped(
    app: FastAPI,
    services: Services,
    *,
    metrics_need_key: bool = True,
    local_only: bool = False,
    origins: Sequence[str] = (),
) -> ASGIApp:
    async def api_error(request: Request, error: Exception) -> Response:
        if not isinstance(error, ApiError):
            raise error
        services.metrics.failed(error)
        return error_response(error, request.url.path, request.state.label)

    async def routing_error(request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            raise error
        response = await api_error(request, _as_api_error(error, request.url.path))
        for name, value in (error.headers or {}).items():
            response.headers[name] = value  # Allow, with a 405
        return response

    async def disconnected(_request: Request, _error: Exception) -> Response:
        services.metrics.cancelled.inc()
        return Response(status_code=400)  # not sent: the client has disconnected

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, routing_error)
    app.add_exception_handler(ClientDisconnect, disconnected)
    return RequestMiddleware(
        app,
        services.auth,
        services.metrics,
        lambda: services.admission.ending,
        metrics_need_key=metrics_need_key,
        local_only=local_only,
        origins=origins,
    )


def _as_api_error(error: HTTPException, path: str) -> ApiError:
    if error.status_code == 404:
        return NotFoundError(f"There is nothing at the path '{path[:100]}'; GET /docs lists what there is.")
    if error.status_code == 405:
        return MethodNotAllowedError("This path does not take this method; GET /docs lists what there is.")
    refusal = InvalidRequestError(str(error.detail)[:300])
    refusal.status = error.status_code
    return refusal
