"""The public gRPC API: the same validator, pipeline and errors as HTTP, in protobuf (proto/inference.proto)."""

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import orjson
import structlog
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError, Message

from headrace_base.cluster_member import unauthenticated_handler
from headrace_proto import inference_pb2
from headrace_proto.inference_pb2 import (
    ChatMessage,
    ChatMessages,
    GenerateEvent,
    GenerateOptions,
    GenerateRequest,
    ListModelsRequest,
    ListModelsResponse,
    ModelInfo,
    TokenProbability,
    Tool,
    ToolCall,
    ToolCallPart,
    Usage,
)
from headrace_proto.replica_pb2 import TokenLogprobs
from headrace_router.access.auth import Authenticator, Tenant
from headrace_router.api.body_budget import BodyShare
from headrace_router.api.grpc.call_shares import CallShares
from headrace_router.api.grpc.grpc_health import HEALTH_PREFIX
from headrace_router.api.grpc.send_watch import SendWatch
from headrace_router.api.grpc.wire_size import WireError, check_values
from headrace_router.api.http.body import SMALL_BYTES
from headrace_router.api.services import Services, request_id, session_of
from headrace_router.core.account import Cause, TimeAccount
from headrace_router.core.errors import (
    ApiError,
    AuthenticationError,
    InternalError,
    InvalidRequestError,
    RequestTimeoutError,
)
from headrace_router.core.limits import Limits
from headrace_router.dispatch.choice import ChoiceUpdate, ParsedParts
from headrace_router.dispatch.prepare import count_choices
from headrace_router.validation.bodies import ChatBody, CompletionBody
from headrace_router.validation.body_errors import parse_body

NAME_BYTES = 1024  # of a request that has a name at most
HEALTH_SECONDS = 1.0  # for a request for health, which needs no key


async def read_request(requests: AsyncIterator[bytes], seconds: float) -> bytes:
    """The one message of a call. Raises RequestTimeoutError."""
    try:
        async with asyncio.timeout(seconds):
            async for request in requests:
                return request
    except TimeoutError:
        pass
    raise RequestTimeoutError(f"The request did not arrive within {seconds:g} s.")


class SmallRequestInterceptor(grpc.aio.ServerInterceptor):
    """For every method with one small request, and for streams that stay open: health, reflection, ListModels."""

    def __init__(self, limits: Limits) -> None:
        self._seconds = limits.header_seconds

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        health = handler_call_details.method.startswith(HEALTH_PREFIX)
        seconds = min(self._seconds, HEALTH_SECONDS) if health else self._seconds
        if handler.unary_unary is not None:
            return grpc.stream_unary_rpc_method_handler(
                _unary(handler, seconds), response_serializer=handler.response_serializer
            )
        if handler.unary_stream is not None:
            return grpc.stream_stream_rpc_method_handler(
                _stream(handler, seconds), response_serializer=handler.response_serializer
            )
        if handler.stream_stream is not None and handler.request_deserializer is not None:
            return grpc.stream_stream_rpc_method_handler(
                _bidirectional(handler), response_serializer=handler.response_serializer
            )
        return handler


def _unary(handler: Any, seconds: float) -> Any:
    async def call(requests: AsyncIterator[bytes], context: Any) -> Any:
        return await handler.unary_unary(await _read(handler, requests, seconds, context), context)

    return call


def _stream(handler: Any, seconds: float) -> Any:
    async def call(requests: AsyncIterator[bytes], context: Any) -> Any:
        async for response in handler.unary_stream(await _read(handler, requests, seconds, context), context):
            yield response

    return call


def _bidirectional(handler: Any) -> Any:
    async def parsed(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        async for data in requests:
            yield await _parse(handler, data, context)

    async def call(requests: AsyncIterator[bytes], context: Any) -> Any:
        async for response in handler.stream_stream(parsed(requests, context), context):
            yield response

    return call


async def _read(handler: Any, requests: AsyncIterator[bytes], seconds: float, context: Any) -> Any:
    try:
        data = await read_request(requests, seconds)
    except RequestTimeoutError as error:
        return await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, error.message)
    return await _parse(handler, data, context)


async def _parse(handler: Any, data: bytes, context: Any) -> Any:
    """A small request; the call ends with an error if the bytes are none, for which gRPC would log a traceback."""
    if len(data) > NAME_BYTES:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"this request may have {NAME_BYTES} bytes")
    try:
        return handler.request_deserializer(data)
    except DecodeError:
        return await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this is no message of this method")


REQUEST_ID = "x-request-id"
SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name

log = structlog.get_logger("headrace.router.grpc")


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Every method but health needs a key when keys are set, reflection and unknown methods included.

    The calls of each key are counted, and so are those without a key.
    """

    def __init__(self, auth: Authenticator, shares: CallShares) -> None:
        self._auth = auth
        self._shares = shares

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = handler_call_details.method
        given = _authorization(handler_call_details.invocation_metadata)
        tenant = self._auth.tenant(given)
        handler = await continuation(handler_call_details)
        if handler is not None and method.startswith(HEALTH_PREFIX) and (tenant is None or self._auth.open):
            return self._shares.limited_without_key(handler)
        if tenant is None:
            sentence = "send a valid API key in the metadata 'authorization: Bearer KEY'"
            return unauthenticated_handler(sentence)
        if self._auth.open or handler is None:
            return handler
        return self._shares.limited(handler, tenant.name)


class InferenceService:
    """headrace.v1.Inference."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def handler(self) -> grpc.GenericRpcHandler:
        """Its methods. Generate gets the bytes of its request: how long to wait for them, and what they may contain,
        is decided here."""
        methods = {
            "Generate": grpc.stream_stream_rpc_method_handler(
                self.Generate, response_serializer=GenerateEvent.SerializeToString
            ),
            "ListModels": grpc.unary_unary_rpc_method_handler(
                self.ListModels, ListModelsRequest.FromString, ListModelsResponse.SerializeToString
            ),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def Generate(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[GenerateEvent]:
        disconnected = True  # unless the generator ends in one of the ways below
        share: BodyShare | None = None
        watch = SendWatch(self._services.config.limits.write_seconds)
        label = _label(context.invocation_metadata())
        context.set_trailing_metadata(((REQUEST_ID, label),))
        try:
            tenant = self._tenant(context)
            session = session_of(context.invocation_metadata(), self._services.config)
            share = self._services.body_budget.share(tenant.name)
            data = await read_request(requests, self._services.config.limits.body_seconds)
            share.add(len(data))
            body = await self._parse(data, tenant)
            async for event in self._generate(body, tenant, share, session, label):
                watch.sending = True
                yield event
                watch.sending = False
                watch.sent += 1
            disconnected = False
        except ApiError as error:
            disconnected = False
            await self._abort(context, error, label)
        except Exception:
            disconnected = False
            log.exception("gRPC request failed")
            failure = InternalError("The server failed on this request; its log has the details.")
            await self._abort(context, failure, label)
        finally:
            watch.stop()
            if share is not None:
                share.release()
            if disconnected and not self._services.admission.ending:
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

    async def _parse(self, data: bytes, tenant: Tenant) -> ChatBody | CompletionBody:
        parse = functools.partial(_body, data, self._services.config.limits)
        return parse() if len(data) <= SMALL_BYTES else await self._services.pool.run(parse, tenant.name, len(data))

    async def _generate(
        self, body: ChatBody | CompletionBody, tenant: Tenant, share: BodyShare, session: str, label: str
    ) -> AsyncIterator[GenerateEvent]:
        with self._services.account(label, label, time.monotonic()) as account:
            async for event in self._answer(body, tenant, share, session, account):
                yield event

    async def _answer(
        self, body: ChatBody | CompletionBody, tenant: Tenant, share: BodyShare, session: str, account: TimeAccount
    ) -> AsyncIterator[GenerateEvent]:
        services = self._services
        async with services.admission.admit(tenant, count_choices(body), body.priority or 0):
            account.enter(Cause.TOKENIZER, time.monotonic())
            request = await services.preparer.prepare(body, tenant, account.request_id, session)
            share.release()
            async with services.run_request(request, account) as running:
                waiting: GenerateEvent | None = None
                while not running.done:
                    for update in await running.take():
                        if waiting is not None:
                            yield waiting
                        waiting = _event(update, request.choices[update.index].prompt_token_ids)
                last = waiting or GenerateEvent()
                last.usage.CopyFrom(
                    Usage(
                        prompt_tokens=request.prompt_tokens,
                        completion_tokens=running.completion_tokens,
                        cached_tokens=running.cached_tokens,
                        reasoning_tokens=running.reasoning_tokens,
                    )
                )
                yield last

    def _tenant(self, context: Any) -> Tenant:
        tenant = self._services.auth.tenant(_authorization(context.invocation_metadata()))
        if tenant is None:
            raise AuthenticationError("Send a valid API key in the metadata 'authorization: Bearer KEY'.")
        return tenant

    async def _abort(self, context: Any, error: ApiError, label: str) -> None:
        self._services.metrics.failed(error)
        trailing = [(REQUEST_ID, label)]
        if error.retry_after is not None:
            trailing.append(("retry-after", str(error.retry_after)))
        await context.abort(grpc.StatusCode[error.grpc_code], error.message, tuple(trailing))


def _body(data: bytes, limits: Limits) -> ChatBody | CompletionBody:
    """The request as the HTTP API's body, so that the same checks apply."""
    check_values(data, GenerateRequest.DESCRIPTOR, limits.body_values)
    try:
        message = GenerateRequest.FromString(data)
    except DecodeError:
        raise WireError("The message is not valid protobuf.") from None
    fields = _fields(message.options)
    fields["model"] = message.model or None
    kind = message.WhichOneof("input")
    if kind == "chat":
        if "logprobs" in fields:
            fields["top_logprobs"] = fields.pop("logprobs")
            fields["logprobs"] = True
        return parse_body(ChatBody, {**fields, **_chat_fields(message.chat)}, limits)
    if kind is None:
        raise InvalidRequestError("Set one of prompt, prompt_token_ids and chat.", param="input")
    fields["prompt"] = message.prompt if kind == "prompt" else list(message.prompt_token_ids.ids)
    return parse_body(CompletionBody, fields, limits)


def _chat_fields(chat: ChatMessages) -> dict[str, Any]:
    """As in a JSON body; what is empty is left out."""
    fields: dict[str, Any] = {"messages": [_message(entry) for entry in chat.messages]}
    if chat.tools:
        fields["tools"] = [_custom_tool(tool) if tool.custom else _function_tool(tool) for tool in chat.tools]
    fields["tool_choice"] = _tool_choice(chat)
    if chat.HasField("parallel_tool_calls"):
        fields["parallel_tool_calls"] = chat.parallel_tool_calls
    fields["reasoning_effort"] = chat.reasoning_effort or None
    fields["chat_template_kwargs"] = _object(chat.chat_template_kwargs, "chat_template_kwargs")
    return fields


def _function_tool(tool: Tool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description or None,
        "parameters": _object(tool.parameters, "tools[].parameters"),
        "strict": tool.strict or None,
    }
    return {"type": "function", "function": function}


def _custom_tool(tool: Tool) -> dict[str, Any]:
    if tool.parameters or tool.strict:
        raise InvalidRequestError("A custom tool has no parameters, and is not strict.", param="tools[].custom")
    custom: dict[str, Any] = {"name": tool.name, "description": tool.description or None}
    if tool.HasField("grammar"):
        grammar = {"syntax": tool.grammar.syntax, "definition": tool.grammar.definition}
        custom["format"] = {"type": "grammar", "grammar": grammar}
    return {"type": "custom", "custom": custom}


def _tool_choice(chat: ChatMessages) -> Any:
    if chat.tool and (chat.tool_choice or chat.allowed_tools):
        raise InvalidRequestError("Set tool, or tool_choice and allowed_tools.", param="tool")
    custom = {tool.name for tool in chat.tools if tool.custom}

    def named(name: str) -> dict[str, Any]:
        kind = "custom" if name in custom else "function"
        return {"type": kind, kind: {"name": name}}

    if chat.tool:
        return named(chat.tool)
    if chat.allowed_tools:
        allowed = {"mode": chat.tool_choice or "auto", "tools": [*map(named, chat.allowed_tools)]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return chat.tool_choice or None


def _call(call: ToolCall) -> dict[str, Any]:
    if call.custom:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _message(entry: ChatMessage) -> dict[str, Any]:
    message: dict[str, Any] = {"role": entry.role, "content": entry.content}
    if entry.tool_calls:
        message["tool_calls"] = [_call(call) for call in entry.tool_calls]
    return message | {
        "tool_call_id": entry.tool_call_id or None,
        "reasoning_content": entry.reasoning_content or None,
    }


def _object(text: str, param: str) -> dict[str, Any] | None:
    """Of a JSON object as text; None of an empty text."""
    if not text:
        return None
    try:
        value = orjson.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"'{param}' is no JSON object.", param=param)
    return value


def _fields(options: Message) -> dict[str, Any]:
    """The options that were set, by name."""
    fields: dict[str, Any] = {}
    for descriptor, value in options.ListFields():
        if descriptor.name == "structured_outputs":
            fields["structured_outputs"] = _fields(value)
        elif descriptor.name == "logit_bias":
            fields["logit_bias"] = {str(token_id): bias for token_id, bias in value.items()}
        elif descriptor.is_repeated:
            fields[descriptor.name] = list(value)
        else:
            fields[descriptor.name] = value
    return fields


def _probability(token_id: int, entry: TokenLogprobs) -> TokenProbability:
    return TokenProbability(
        token_id=token_id, logprob=entry.logprob, top_ids=entry.top_ids, top_logprobs=entry.top_logprobs
    )


def _event(update: ChoiceUpdate, prompt: Sequence[int]) -> GenerateEvent:
    """prompt: its token ids."""
    parsed = update.parsed or ParsedParts()
    return GenerateEvent(
        choice_index=update.index,
        text=update.text,
        token_ids=update.token_ids,
        logprobs=[entry.logprob for entry in update.logprobs],
        finish_reason=update.finish_reason or "",
        reasoning_content="".join(parsed.reasoning),
        tool_calls=[
            ToolCallPart(index=part.index, id=part.ident, name=part.name, arguments=part.arguments, custom=part.custom)
            for part in parsed.calls.values()
        ],
        prompt_logprobs=[_probability(*pair) for pair in zip(prompt[1:], update.prompt_logprobs or (), strict=False)],
    )


def _label(metadata: Any) -> str:
    """The id of the request, as the HTTP header x-request-id: the client's, if it is valid."""
    given = next((value for key, value in metadata or () if key == REQUEST_ID), "")
    return request_id(given.encode() if isinstance(given, str) else b"")


def _authorization(metadata: Any) -> bytes | None:
    """None also for several values, of which it is not known which one counts."""
    given = [value for key, value in metadata or () if key == "authorization"]
    if len(given) != 1:
        return None
    return given[0] if isinstance(given[0], bytes) else given[0].encode()
