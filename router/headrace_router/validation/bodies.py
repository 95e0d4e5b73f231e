"""The JSON bodies of the API, as pydantic models: types and ranges here, limits and meaning in `prepare`.

The same models check the gRPC API's requests and define /openapi.json and the
honoured fields of docs/api.md. A field that is null counts as absent; `fields` handles fields that are not listed here.
"""

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    Tag,
    WithJsonSchema,
    model_validator,
)

from headrace_router.core.sampling_options import WHOLE, Number, SamplingOptions, TokenCount, whole

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
UINT32_MAX = 2**32 - 1

TokenId = Annotated[StrictInt, Field(ge=0, le=UINT32_MAX), WHOLE]


def _prompt(value: Any) -> Any:
    """One pass over up to a million ids; pydantic would try each form in turn."""
    if isinstance(value, str) or (isinstance(value, list) and all(type(entry) is str for entry in value)):
        return value
    if not isinstance(value, list):
        raise ValueError("it must be a string, a list of strings, a list of token ids or a list of such lists")
    nested = all(type(entry) is list for entry in value)
    lists = value if nested else [value]
    if not all(type(token) is int for entry in lists for token in entry):
        lists = [[whole(token) for token in entry] for entry in lists]
        value = lists if nested else lists[0]
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


def _not_zero(value: int) -> int:
    if not value:
        raise ValueError("it must be -1, or 1 or more: a prompt has at least one token")
    return value


class StreamOptions(_Body):
    include_usage: StrictBool | None = None


class JsonSchemaFormat(_Body):
    """`schema` is a JSON Schema; an answer always follows it, whether or not `strict` is set."""

    name: Annotated[StrictStr, Field(max_length=512, description="a label")] | None = None
    description: StrictStr | None = Field(default=None, description="a label")
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(_Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = Field(default=None, description="with type json_schema only")
    schema_: dict[str, Any] | None = Field(default=None, alias="schema", description="as llama.cpp has it")

    @model_validator(mode="before")
    @classmethod
    def _check_place(cls, value: Any) -> Any:
        inner = value.get("json_schema") if isinstance(value, dict) else None
        if isinstance(inner, dict) and "schema" not in inner and inner.keys() & {"type", "properties", "anyOf", "$ref"}:
            raise ValueError("the schema belongs into 'json_schema': {'name': …, 'schema': …}")
        if isinstance(value, dict) and "value" in value:
            raise ValueError("send the schema as 'json_schema': {'name': …, 'schema': …}, with the type json_schema")
        return value


class StructuredOutputs(_Body):
    """What the answer must be: exactly one of the fields."""

    json_: dict[str, Any] | StrictStr | None = Field(default=None, alias="json", description="a JSON Schema")
    json_object: StrictBool | None = Field(default=None, description="any JSON object")
    regex: StrictStr | None = None
    choice: Annotated[list[StrictStr], Field(fail_fast=True)] | None = Field(
        default=None, description="one of these texts"
    )
    grammar: StrictStr | None = Field(default=None, description="in Lark's or GBNF's syntax")
    disable_fallback: StrictBool | None = Field(default=None, description="there is none")
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None
    whitespace_pattern: None = None
    structural_tag: None = None


class RequestOptions(_Body, SamplingOptions):
    """Fields of both chats and completions. A sampling option that is omitted has the model's default."""

    model: StrictStr = Field(min_length=1, max_length=512)
    min_tokens: Annotated[StrictInt, Field(ge=0, le=2**31 - 1), WHOLE] | None = None
    seed: Annotated[StrictInt, Field(ge=INT64_MIN, le=INT64_MAX), WHOLE] | None = None
    n: Annotated[StrictInt, Field(ge=1, le=2**31 - 1), WHOLE] | None = None
    stop: StrictStr | Annotated[list[StrictStr], Field(fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = None
    ignore_eos: StrictBool | None = None
    logit_bias: dict[str, Annotated[Number, Field(ge=-100, le=100)]] | None = None
    bad_words: Annotated[list[StrictStr], Field(fail_fast=True)] | None = Field(
        default=None, description="texts that are not generated, as tokens, alone and after a space"
    )
    allowed_token_ids: Annotated[list[TokenId], Field(fail_fast=True, min_length=1)] | None = Field(
        default=None, description="the only tokens that are sampled; end tokens are not added"
    )
    skip_special_tokens: StrictBool | None = Field(default=None, description="false: they stay in the text")
    truncate_prompt_tokens: (
        Annotated[StrictInt, AfterValidator(_not_zero), Field(ge=-1, le=INT32_MAX), WHOLE] | None
    ) = Field(default=None, description="keeps the prompt's last ones; -1: as many as leave room for the answer")
    priority: (
        Annotated[
            StrictInt,
            Field(ge=INT32_MIN, le=INT32_MAX, description="of the requests of one API key the lowest goes first"),
            WHOLE,
        ]
        | None
    ) = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = Field(default=None, description="with stream only")
    return_token_ids: StrictBool | None = Field(default=None, description="adds token_ids to every choice")
    prompt_logprobs: (
        Annotated[StrictInt, Field(ge=0, le=UINT32_MAX, description="of the prompt's tokens; not with stream"), WHOLE]
        | None
    ) = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | StrictStr | None = Field(default=None, description="as `structured_outputs.json`")
    guided_regex: StrictStr | None = Field(default=None, description="as `structured_outputs.regex`")
    guided_choice: Annotated[list[StrictStr], Field(fail_fast=True)] | None = Field(
        default=None, description="as `structured_outputs.choice`"
    )
    guided_grammar: StrictStr | None = Field(default=None, description="as `structured_outputs.grammar`")
    user: StrictStr | None = Field(default=None, description="a label")
    session_id: StrictStr | None = Field(default=None, description="names the session for `--policy session`")

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class TextPart(_Body):
    type: Literal["text"]
    text: StrictStr


class _Open(_Body):
    """An object that comes from an answer, or is part of a definition: other members change nothing."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)


def _kind(value: Any) -> str:
    """The tag of a tool, or of a call; errors leave it out of the path of a field."""
    given = value if isinstance(value, dict) else {}
    without_type = "custom" if "custom" in given and "function" not in given else "function"
    return "(custom)" if (given.get("type") or without_type) == "custom" else "(function)"


class CalledFunction(_Open):
    name: StrictStr = Field(min_length=1, max_length=256)
    arguments: StrictStr = Field(description="a JSON object, as text; what is none stays text")


class FunctionCall(_Open):
    """A call of a function that the assistant made."""

    id: StrictStr | None = Field(default=None, max_length=256)
    type: Literal["function"] | None = None
    function: CalledFunction


class CalledCustom(_Open):
    name: StrictStr = Field(min_length=1, max_length=256)
    input: StrictStr


class CustomCall(_Open):
    """A call of a custom tool that the assistant made."""

    id: StrictStr | None = Field(default=None, max_length=256)
    type: Literal["custom"] | None = None
    custom: CalledCustom


ToolCall = Annotated[
    Annotated[FunctionCall, Tag("(function)")] | Annotated[CustomCall, Tag("(custom)")], Discriminator(_kind)
]


class ChatMessage(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: StrictStr | Annotated[list[TextPart], Field(fail_fast=True)] | None = Field(
        default=None, description="may be left out by an assistant and a tool"
    )
    name: StrictStr | None = Field(default=None, max_length=256)
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = Field(
        default=None, description="of an assistant"
    )
    tool_call_id: StrictStr | None = Field(
        default=None, max_length=256, description="of a tool: the call whose result this is"
    )
    reasoning_content: StrictStr | None = Field(default=None, description="of an assistant; for the chat template")
    reasoning: StrictStr | None = Field(default=None, description="as `reasoning_content`")

    @model_validator(mode="after")
    def _check_role(self) -> "ChatMessage":
        if self.tool_calls and self.role != "assistant":
            raise ValueError("'tool_calls' belong into messages of the role assistant")
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError("'tool_call_id' belongs into messages of the role tool")
        # An answer that was cut off in its reasoning has none, and a tool may have nothing to say.
        if self.content is None and self.role not in ("assistant", "tool"):
            raise ValueError("'content' is missing")
        return self


ToolName = Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class Function(_Open):
    name: ToolName
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="a JSON Schema of an object")
    strict: StrictBool | None = Field(default=None, description="the arguments always follow the schema")


class FunctionTool(_Open):
    type: Literal["function"]
    function: Function

    @model_validator(mode="before")
    @classmethod
    def _check_place(cls, value: Any) -> Any:
        if isinstance(value, dict) and "name" in value and "function" not in value:
            raise ValueError("the name, description and parameters belong into 'function': {'name': …}")
        if isinstance(value, dict) and isinstance(value.get("type"), str) and value["type"] != "function":
            raise ValueError(f"tools of the type '{value['type'][:50]}' are not supported; send function or custom")
        return value


class InputGrammar(_Open):
    syntax: Literal["lark", "regex"]
    definition: StrictStr = Field(min_length=1)


class CustomFormat(_Open):
    """What the input of a custom tool must be."""

    type: Literal["text", "grammar"]
    grammar: InputGrammar | None = Field(default=None, description="with type grammar only")

    @model_validator(mode="after")
    def _check_grammar(self) -> "CustomFormat":
        if (self.grammar is not None) != (self.type == "grammar"):
            raise ValueError("with the type grammar, and only then, it has 'grammar': {'syntax': …, 'definition': …}")
        return self


class Custom(_Body):
    name: ToolName
    description: StrictStr | None = None
    format: CustomFormat | None = Field(default=None, description="of the input; any text without it")


class CustomTool(_Open):
    """A tool that takes free text."""

    type: Literal["custom"]
    custom: Custom

    @model_validator(mode="before")
    @classmethod
    def _check_place(cls, value: Any) -> Any:
        if isinstance(value, dict) and "name" in value and "custom" not in value:
            raise ValueError("the name, description and format belong into 'custom': {'name': …}")
        return value


Tool = Annotated[
    Annotated[FunctionTool, Tag("(function)")] | Annotated[CustomTool, Tag("(custom)")], Discriminator(_kind)
]


class _Named(_Open):
    name: StrictStr


class NamedFunction(_Open):
    """A function among the tools."""

    type: Literal["function"]
    function: _Named


class NamedCustom(_Open):
    """A custom tool among the tools."""

    type: Literal["custom"]
    custom: _Named


NamedTool = Annotated[
    Annotated[NamedFunction, Tag("(function)")] | Annotated[NamedCustom, Tag("(custom)")], Discriminator(_kind)
]


class AllowedTools(_Open):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True)] = Field(min_length=1)


class AllowedChoice(_Open):
    """The tools that may be called, or one of which must be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


_MEMBER = {"function": "name", "custom": "name", "allowed_tools": "tools"}


def _tool_choice(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    member = _MEMBER.get(kind, "") if isinstance(kind, str) else ""
    inner = value.get(kind) if member else None
    if value in ("none", "auto", "required") or (isinstance(inner, dict) and member in inner):
        return value
    raise ValueError(
        "it must be none, auto, required (a call of any tool), {'type': 'function', 'function': {'name': …}} or "
        "{'type': 'custom', 'custom': {'name': …}} for one of the tools, or {'type': 'allowed_tools', 'allowed_tools': "
        "{'mode': 'auto' or 'required', 'tools': […]}} for some of them"
    )


def _choice_kind(value: Any) -> str:
    if not isinstance(value, dict):
        return "(word)"
    return "(allowed)" if value["type"] == "allowed_tools" else _kind(value)


ToolChoiceInput = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("(word)")]
    | Annotated[NamedFunction, Tag("(function)")]
    | Annotated[NamedCustom, Tag("(custom)")]
    | Annotated[AllowedChoice, Tag("(allowed)")],
    Discriminator(_choice_kind),
    BeforeValidator(_tool_choice),
]


class ChatBody(RequestOptions):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field(min_length=1)
    max_completion_tokens: TokenCount | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=UINT32_MAX, description="with logprobs only"), WHOLE] | None = (
        None
    )
    documents: list[dict[str, Any]] | None = Field(default=None, description="for the chat template")
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="variables of the chat template")
    reasoning_effort: Annotated[StrictStr, Field(max_length=64, description="for the chat template")] | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = Field(
        default=None, description="the answer goes on with the text of the last message"
    )
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = Field(
        default=None, description="that the model may call; see docs/tools.md"
    )
    tool_choice: ToolChoiceInput | None = Field(default=None, description="auto if there are tools")
    parallel_tool_calls: StrictBool | None = Field(
        default=None, description="false: the answer ends with its first call"
    )
    include_reasoning: StrictBool | None = Field(default=None, description="false: the answer's reasoning is left out")
    max_reasoning_tokens: (
        Annotated[
            StrictInt,
            Field(ge=0, le=INT32_MAX, description="then the reasoning is ended, and the answer begins"),
            WHOLE,
        ]
        | None
    ) = None
    metadata: dict[str, StrictStr] | None = Field(default=None, description="labels")
    safety_identifier: StrictStr | None = Field(default=None, description="a label")
    prompt_cache_key: StrictStr | None = Field(
        default=None, description="names the session for `--policy session`, before `session_id`"
    )


class CompletionBody(RequestOptions):
    """POST /v1/completions."""

    prompt: PromptInput
    echo: StrictBool | None = None
    logprobs: Annotated[StrictInt, Field(ge=0, le=UINT32_MAX), WHOLE] | None = None
    best_of: Annotated[StrictInt, Field(ge=1, le=2**31 - 1, description="only n is supported"), WHOLE] | None = None
