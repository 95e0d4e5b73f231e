"""The public gRPC API: the same validator, pipeline and errors as HTTP, in protobuf (proto/inference.proto)."""

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import structlog
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message

from headrace_proto.call_refusal import unauthenticated_handler
from headrace_proto.inference_pb2 import (
    GenerateEvent,
    GenerateOptions,
    GenerateRequest,
    ListModelsRequest,
    ListModelsResponse,
    ModelInfo,
    Usage,
)
from headrace_proto.inference_pb2_grpc import InferenceServicer
from headrace_router.access.auth import Authenticator, Tenant
from headrace_router.api.services import Services
from headrace_router.core.errors import ApiError, AuthenticationError, InternalError, InvalidRequestError
from headrace_router.core.limits import Limits
from headrace_router.dispatch.choice import ChoiceUpdate
from headrace_router.validation.bodies import ChatBody, CompletionBody
from headrace_router.validation.body_errors import parse_body

HEALTH_PREFIX = "/grpc.health.v1.Health/"

log = structlog.get_logger("headrace.router.grpc")


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Every method but health needs a key when keys are set, reflection and unknown methods included (R3)."""

    def __init__(self, auth: Authenticator) -> None:
        self._auth = auth

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = handler_call_details.method
        given = _authorization(handler_call_details.invocation_metadata)
        if method.startswith(HEALTH_PREFIX) or self._auth.tenant(given) is not None:
            return await continuation(handler_call_details)
        sentence = "send a valid API key in the metadata 'authorization: Bearer KEY'"
        return unauthenticated_handler(await continuation(handler_call_details), sentence)


class InferenceService(InferenceServicer):
    """headrace.v1.Inference."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def Generate(self, request: GenerateRequest, context: Any) -> AsyncIterator[GenerateEvent]:
        disconnected = True  # unless the generator ends in one of the ways below
        try:
            async for event in self._generate(request, self._tenant(context)):
                yield event
            disconnected = False
        except ApiError as error:
            disconnected = False
            await self._abort(context, error)
        except Exception:
            disconnected = False
            log.exception("gRPC request failed")
            await self._abort(context, InternalError("The server failed on this request; its log has the details."))
        finally:
            if disconnected and not self._services.admission.closed:
                self._services.metrics.cancelled.inc()

    async def ListModels(self, request: ListModelsRequest, context: Any) -> ListModelsResponse:
        infos = [
            ModelInfo(
                id=name,
                created=model.created,
                max_model_len=model.max_model_len or 0,
                defaults=ParseDict(dict(model.defaults or {}), GenerateOptions()),
            )
            for model in self._services.fleet.models()
            for name in (model.name, *model.aliases)
        ]
        return ListModelsResponse(models=infos)

    async def _generate(self, message: GenerateRequest, tenant: Tenant) -> AsyncIterator[GenerateEvent]:
        services = self._services
        body = _body(message, services.config.limits)
        async with services.admission.admit(tenant):
            request = await services.preparer.prepare(body, tenant, secrets.token_hex(16))
            async with services.run_request(request) as running:
                waiting: GenerateEvent | None = None
                while not running.done:
                    for update in await running.take():
                        if waiting is not None:
                            yield waiting
                        waiting = _event(update)
                last = waiting or GenerateEvent()
                last.usage.CopyFrom(
                    Usage(
                        prompt_tokens=request.prompt_tokens,
                        completion_tokens=running.completion_tokens,
                        cached_tokens=running.cached_tokens,
                    )
                )
                yield last

    def _tenant(self, context: Any) -> Tenant:
        tenant = self._services.auth.tenant(_authorization(context.invocation_metadata()))
        if tenant is None:
            raise AuthenticationError("Send a valid API key in the metadata 'authorization: Bearer KEY'.")
        return tenant

    async def _abort(self, context: Any, error: ApiError) -> None:
        self._services.metrics.failed(error)
        trailing = () if error.retry_after is None else (("retry-after", str(error.retry_after)),)
        await context.abort(grpc.StatusCode[error.grpc_code], error.message, trailing)


def _body(message: GenerateRequest, limits: Limits) -> ChatBody | CompletionBody:
    """The request as the HTTP API's body, so that the same checks apply."""
    fields = _fields(message.options)
    fields["model"] = message.model or None
    kind = message.WhichOneof("input")
    if kind == "chat":
        if "logprobs" in fields:
            fields["top_logprobs"] = fields.pop("logprobs")
            fields["logprobs"] = True
        fields["messages"] = [{"role": entry.role, "content": entry.content} for entry in message.chat.messages]
        return parse_body(ChatBody, fields, limits)
    if kind is None:
        raise InvalidRequestError("Set one of prompt, prompt_token_ids and chat.", param="input")
    fields["prompt"] = message.prompt if kind == "prompt" else list(message.prompt_token_ids.ids)
    return parse_body(CompletionBody, fields, limits)


def _fields(options: Message) -> dict[str, Any]:
    """The options that were set, by name."""
    fields: dict[str, Any] = {}
    for descriptor, value in options.ListFields():
        if descriptor.name == "logit_bias":
            fields["logit_bias"] = {str(token_id): bias for token_id, bias in value.items()}
        elif descriptor.is_repeated:
            fields[descriptor.name] = list(value)
        else:
            fields[descriptor.name] = value
    return fields


def _event(update: ChoiceUpdate) -> GenerateEvent:
    return GenerateEvent(
        choice_index=update.index,
        text=update.text,
        token_ids=update.token_ids,
        logprobs=[entry.logprob for entry in update.logprobs],
        finish_reason=update.finish_reason or "",
    )


def _authorization(metadata: Any) -> bytes | None:
    for key, value in metadata or ():
        if key == "authorization":
            return value if isinstance(value, bytes) else value.encode()
    return None
