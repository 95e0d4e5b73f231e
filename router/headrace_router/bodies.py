"""The JSON bodies of the API, as pydantic models: types and ranges here, limits and meaning in `prepare`.

The same models check the gRPC API's requests (RELIABILITY R5) and write /openapi.json. A field that is null counts as
absent; a field that is not listed is refused.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    WithJsonSchema,
)

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
UINT32_MAX = 2**32 - 1

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
TokenId = Annotated[StrictInt, Field(ge=0, le=UINT32_MAX)]
TokenCount = Annotated[StrictInt, Field(ge=1, le=2**31 - 1)]


def _prompt(value: Any) -> Any:
    """One pass over what may be a million ids; pydantic would try each form in turn."""
    if isinstance(value, str) or (isinstance(value, list) and all(type(entry) is str for entry in value)):
        return value
    if not isinstance(value, list):
        raise ValueError("it must be a string, a list of strings, a list of token ids or a list of such lists")
    lists = value if all(type(entry) is list for entry in value) else [value]
    if not all(type(token) is int and 0 <= token <= UINT32_MAX for entry in lists for token in entry):
        raise ValueError("it must be a string, a list of strings, a list of token ids or a list of such lists")
    return value


_ID_LIST = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        _ID_LIST,
        {"type": "array", "items": _ID_LIST},
    ]
}
PromptInput = Annotated[Any, BeforeValidator(_prompt), WithJsonSchema(_PROMPT_SCHEMA)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    # Fields of the API that are not supported, with the values that ask for nothing.
    refused: ClassVar[dict[str, tuple[Any, ...]]] = {}


class StreamOptions(_Body):
    include_usage: StrictBool | None = None


class _Options(_Body):
    """What chats and completions share."""

    model: StrictStr = Field(min_length=1, max_length=512)
    max_tokens: TokenCount | None = None
    min_tokens: Annotated[StrictInt, Field(ge=0, le=2**31 - 1)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1, le=2**31 - 1, description="0 or -1 = off")] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=10)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    seed: Annotated[StrictInt, Field(ge=INT64_MIN, le=INT64_MAX)] | None = None
    n: Annotated[StrictInt, Field(ge=1, le=2**31 - 1)] | None = None
    stop: StrictStr | Annotated[list[StrictStr], Field(fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = None
    ignore_eos: StrictBool | None = None
    logit_bias: dict[str, Annotated[Number, Field(ge=-100, le=100)]] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: StrictBool | None = Field(default=None, description="adds token_ids to every choice")
    user: StrictStr | None = None


class TextPart(_Body):
    type: Literal["text"]
    text: StrictStr


class ChatMessage(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: StrictStr | Annotated[list[TextPart], Field(fail_fast=True)]
    name: StrictStr | None = Field(default=None, max_length=256)


class ChatBody(_Options):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field(min_length=1)
    max_completion_tokens: TokenCount | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=UINT32_MAX)] | None = None
    metadata: dict[str, StrictStr] | None = None
    safety_identifier: StrictStr | None = None
    prompt_cache_key: StrictStr | None = None

    refused: ClassVar[dict[str, tuple[Any, ...]]] = {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": (),
        "verbosity": (),
        "web_search_options": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "chat_template": (),
        "chat_template_kwargs": ({},),
    }


class CompletionBody(_Options):
    """POST /v1/completions."""

    prompt: PromptInput
    echo: StrictBool | None = None
    logprobs: Annotated[StrictInt, Field(ge=0, le=UINT32_MAX)] | None = None
    best_of: Annotated[StrictInt, Field(ge=1, le=2**31 - 1)] | None = None

    refused: ClassVar[dict[str, tuple[Any, ...]]] = {"suffix": ("",)}
