"""The public gRPC API: the same validator, pipeline and errors as HTTP, in protobuf (proto/inference.proto)."""

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
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
from headrace_router.api.grpc.grpc_health import HEALTH_PREFIX
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
from headrace_router.validation.body_errors import IgnoredFields, parse_body

REQUEST_ID = "x-request-id"
Trailing = list[tuple[str, str]]  # metadata after the last event
SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name

log = structlog.get_logger("headrace.router.grpc")


async def read_request(requests: AsyncIterator[bytes], seconds: float) -> bytes:
    """The one message of a call. Raises RequestTimeoutError."""
    try:
        async with asyncio.timeout(seconds):
            async for request in requests:
                return request
    except TimeoutError:
        pass
    raise RequestTimeoutError(f"The request did not arrive within {seconds:g} s.")


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Every method but health needs a key when keys are set, reflection and unknown methods included."""

    def __init__(self, auth: Authenticator) -> None:
        self._auth = auth

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        given = _authorization(handler_call_details.invocation_metadata)
        if handler_call_details.method.startswith(HEALTH_PREFIX) or self._auth.tenant(given) is not None:
            return await continuation(handler_call_details)
        return unauthenticated_handler("send a valid API key in the metadata 'authorization: Bearer KEY'")


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

    async def Generate(self, requests: AsyncIterator[bytes], context: Any) -> None:
        disconnected = True  # unless the call ends in one of the ways below
        limits = self._services.config.limits
        label = _label(context.invocation_metadata())
        context.set_trailing_metadata(((REQUEST_ID, label),))
        try:
            tenant = self._tenant(context)
            session = session_of(context.invocation_metadata(), self._services.config)
            data = await read_request(requests, limits.body_seconds)
            body = await self._parse(data, tenant)
            trailing: Trailing = [(REQUEST_ID, label)]
            async with contextlib.aclosing(self._generate(body, tenant, session, label, trailing)) as events:
                async for event in events:
                    async with asyncio.timeout(limits.write_seconds):
                        await context.write(event)
            context.set_trailing_metadata(tuple(trailing))
            disconnected = False
        except TimeoutError:  # the client does not read
            raise asyncio.CancelledError from None
        except ApiError as error:
            disconnected = False
            await self._abort(context, error, label)
        except Exception:
            disconnected = False
            log.exception("gRPC request failed")
            failure = InternalError("The server failed on this request; its log has the details.")
            await self._abort(context, failure, label)
        finally:
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
            for name in model.names
        ]
        return ListModelsResponse(models=infos)

    async def _parse(self, data: bytes, tenant: Tenant) -> ChatBody | CompletionBody:
        parse = functools.partial(_body, data, self._services.config.limits)
        return parse() if len(data) <= SMALL_BYTES else await self._services.pool.run(parse, tenant.name, len(data))

    async def _generate(
        self, body: ChatBody | CompletionBody, tenant: Tenant, session: str, label: str, trailing: Trailing
    ) -> AsyncGenerator[GenerateEvent, None]:
        with self._services.account(label, label, time.monotonic()) as account:
            async with contextlib.aclosing(self._answer(body, tenant, session, account, trailing)) as events:
                async for event in events:
                    yield event

    async def _answer(
        self,
        body: ChatBody | CompletionBody,
        tenant: Tenant,
        session: str,
        account: TimeAccount,
        trailing: Trailing,
    ) -> AsyncGenerator[GenerateEvent, None]:
        services = self._services
        async with services.admission.admit(tenant, count_choices(body), body.priority or 0):
            account.enter(Cause.TOKENIZER, time.monotonic())
            request = await services.preparer.prepare(body, tenant, account.request_id, session)
            ignored = IgnoredFields()
            for field in request.ignored:
                ignored.add(field)
            trailing += [(name.decode(), value.decode()) for name, value in ignored.headers()]
            async with services.run_request(request, account) as running:
                waiting: GenerateEvent | None = None
                echoes = dict(enumerate(request.echoes))  # the first event of a choice has it
                while not running.done:
                    for update in await running.take():
                        if waiting is not None:
                            yield waiting
                        waiting = _event(update, request.choices[update.index].prompt_token_ids)
                        waiting.text = echoes.pop(update.index, "") + waiting.text
                        if isinstance(body, ChatBody) and body.include_reasoning is False:
                            waiting.ClearField("reasoning_content")
                if running.cache_miss is not None:
                    trailing.append(("x-headrace-cache-miss", running.cache_miss.public))
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
    try:
        message = GenerateRequest.FromString(data)
    except DecodeError:
        raise InvalidRequestError("The message is not valid protobuf.") from None
    chat = message.chat
    if (
        max(len(chat.messages), len(chat.tools), *(len(entry.tool_calls) for entry in chat.messages), 0)
        > limits.messages
    ):
        raise InvalidRequestError(f"A chat has at most {limits.messages} messages, tools, and calls.", param="chat")
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


_OPTIONAL = (
    "parallel_tool_calls",
    "include_reasoning",
    "max_reasoning_tokens",
    "add_generation_prompt",
    "continue_final_message",
)


def _chat_fields(chat: ChatMessages) -> dict[str, Any]:
    """As in a JSON body; what is empty is left out."""
    fields: dict[str, Any] = {"messages": [_message(entry) for entry in chat.messages]}
    if chat.tools:
        fields["tools"] = [_custom_tool(tool) if tool.custom else _function_tool(tool) for tool in chat.tools]
    fields["tool_choice"] = _tool_choice(chat)
    for name in _OPTIONAL:
        if chat.HasField(name):
            fields[name] = getattr(chat, name)
    for name in ("reasoning_effort", "safety_identifier", "prompt_cache_key"):
        fields[name] = getattr(chat, name) or None
    fields["chat_template_kwargs"] = _object(chat.chat_template_kwargs, "chat_template_kwargs")
    fields["documents"] = [_object(text, "documents") or {} for text in chat.documents] or None
    fields["metadata"] = dict(chat.metadata) or None
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
        "name": entry.name or None,
        "tool_call_id": entry.tool_call_id or None,
        "reasoning_content": entry.reasoning_content or None,
    }


def _object(text: str, param: str) -> dict[str, Any] | None:
    """The JSON object in this text; None for an empty text."""
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
        logprobs=[_probability(*pair) for pair in zip(update.token_ids, update.logprobs, strict=False)],
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
