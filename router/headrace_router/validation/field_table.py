"""Every known field, by scope: honoured (declared in the pydantic models) or restricted (the tables here)."""

from dataclasses import dataclass
from enum import Enum, Flag, auto
from typing import Any

import orjson
from pydantic import BaseModel

from headrace_router.core.errors import InvalidValueError, UnsupportedError
from headrace_router.validation.bodies import ChatBody, ChatMessage, CompletionBody, StreamOptions, TextPart


class Scope(Enum):
    """An object of a request; the value is the prefix of its fields' paths."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    STREAM_OPTIONS = "stream_options"
    MESSAGE = "messages[]"
    PART = "messages[].content[]"

    @property
    def model(self) -> type[BaseModel]:
        """The pydantic model, which declares the honoured fields."""
        return _MODELS[self]

    @property
    def max_fields(self) -> int:
        """The most fields of one object: bounds the work on unknown fields."""
        return 100 if self in (Scope.CHAT, Scope.COMPLETIONS) else 32


_MODELS: dict[Scope, type[BaseModel]] = {
    Scope.CHAT: ChatBody,
    Scope.COMPLETIONS: CompletionBody,
    Scope.STREAM_OPTIONS: StreamOptions,
    Scope.MESSAGE: ChatMessage,
    Scope.PART: TextPart,
}


class JsonKind(Flag):
    """A set of kinds: `STRING | LIST` is either."""

    BOOLEAN = auto()
    INTEGER = auto()
    NUMBER = auto()
    STRING = auto()
    LIST = auto()
    OBJECT = auto()

    def fits(self, value: Any) -> bool:
        """Whether a decoded JSON value is of one of these kinds. 1.0 is an integer, as JSON has one type of number."""
        return bool(_kind_of(value) & self)

    def __str__(self) -> str:
        return " or ".join(str(kind.name).lower() for kind in self)


def _kind_of(value: Any) -> JsonKind:
    if isinstance(value, bool):
        return JsonKind.BOOLEAN
    if isinstance(value, int):
        return JsonKind.INTEGER | JsonKind.NUMBER
    if isinstance(value, float):
        return JsonKind.INTEGER | JsonKind.NUMBER if value.is_integer() else JsonKind.NUMBER
    if isinstance(value, str):
        return JsonKind.STRING
    return JsonKind.LIST if isinstance(value, list) else JsonKind.OBJECT


def same_json(given: Any, allowed: Any) -> bool:
    """Whether a client's value is this one: 1 is 1.0, 0 is not false, and members that are null count as absent.

    Its depth is that of `allowed`, whatever the client sent.
    """
    if isinstance(allowed, dict):
        if not isinstance(given, dict):
            return False
        members = {name: value for name, value in given.items() if value is not None}
        return members.keys() == allowed.keys() and all(same_json(members[name], allowed[name]) for name in allowed)
    if isinstance(allowed, list):
        return isinstance(given, list) and len(given) == len(allowed) and all(map(same_json, given, allowed))
    return _kind_of(given) == _kind_of(allowed) and bool(given == allowed)


@dataclass(frozen=True, slots=True)
class RestrictedField:
    """`accepts`: the values that change nothing; None = every value of the kind, () = no value."""

    name: str
    kind: JsonKind
    accepts: tuple[Any, ...] | None
    note: str = ""  # a sentence with the reason, or with what to send instead

    def check(self, value: Any, path: str) -> None:
        """Returns if this value changes nothing. `path` is the field's name in errors.

        Raises UnsupportedError, or InvalidValueError if the value has the wrong type.
        """
        if self.accepts is None:
            if not self.kind.fits(value):
                raise self._wrong_kind(path)
        elif not any(same_json(value, allowed) for allowed in self.accepts):
            if self.accepts and not self.kind.fits(value):
                raise self._wrong_kind(path)
            raise UnsupportedError(self._refusal(path), param=path)

    def _wrong_kind(self, path: str) -> InvalidValueError:
        return InvalidValueError(f"'{path}' is not valid: its type must be {self.kind}.", param=path)

    def _refusal(self, path: str) -> str:
        only = " or ".join(orjson.dumps(value).decode() for value in self.accepts or ())
        sentence = f"'{path}' is not supported by this server" + (f"; it may only be {only}." if only else ".")
        return f"{sentence} {self.note}".rstrip()


def accepted(name: str, kind: JsonKind, note: str) -> RestrictedField:
    """A field of which no value of this kind changes an answer."""
    return RestrictedField(name, kind, None, note)


def accepted_at(name: str, kind: JsonKind, *values: Any, note: str = "") -> RestrictedField:
    """A field of which these values change nothing; any other would, and is refused."""
    return RestrictedField(name, kind, values, note)


def refused(name: str, kind: JsonKind, note: str = "") -> RestrictedField:
    """A field of which every value would change the answer."""
    return RestrictedField(name, kind, (), note)


_CACHED = "Prefixes are always cached."

STREAM_OPTIONS: tuple[RestrictedField, ...] = (
    accepted_at("continuous_usage_stats", JsonKind.BOOLEAN, False),
    accepted_at("include_obfuscation", JsonKind.BOOLEAN, False),
)

MESSAGE: tuple[RestrictedField, ...] = (
    refused("function_call", JsonKind.OBJECT),
    accepted_at("tools", JsonKind.LIST, []),
    refused("audio", JsonKind.OBJECT),
    accepted_at("refusal", JsonKind.STRING, ""),
    accepted("annotations", JsonKind.LIST, "Part of an answer that is sent back; not passed to templates."),
    accepted_at("thinking_blocks", JsonKind.LIST, []),
    accepted("reasoning_details", JsonKind.LIST, "Part of an answer that is sent back."),
    accepted("provider_specific_fields", JsonKind.OBJECT, "Part of an answer that is sent back."),
    accepted("cache_control", JsonKind.OBJECT, _CACHED),
    accepted_at("prefix", JsonKind.BOOLEAN, False),
)

PART: tuple[RestrictedField, ...] = (
    accepted("cache_control", JsonKind.OBJECT, _CACHED),
    accepted("prompt_cache_breakpoint", JsonKind.OBJECT, _CACHED),
    accepted("annotations", JsonKind.LIST, "Part of an answer that is sent back."),
)


_BOOLEAN, _INTEGER, _NUMBER = JsonKind.BOOLEAN, JsonKind.INTEGER, JsonKind.NUMBER
_STRING, _LIST, _OBJECT = JsonKind.STRING, JsonKind.LIST, JsonKind.OBJECT
_METHOD_OFF = "A parameter of a method that is off."
_ROUTER_PLACES = "The router places requests itself."

BOTH: tuple[RestrictedField, ...] = (
    # Constraints on the output.
    accepted("guided_decoding_backend", _STRING, "There is one."),
    refused("guided_whitespace_pattern", _STRING),
    refused("regex", _STRING, "Send 'structured_outputs': {'regex': …}."),
    refused("ebnf", _STRING, "Send 'structured_outputs': {'grammar': …}."),
    accepted_at("grammar", _STRING, "", note="Send 'structured_outputs': {'grammar': …}."),
    refused("json_schema", _OBJECT | _STRING, "Send 'response_format'."),
    accepted_at("logits_processors", _LIST, []),
    refused("custom_logit_processor", _STRING | _LIST),
    accepted_at("custom_params", _OBJECT, {}),
    accepted_at("vllm_xargs", _OBJECT, {}),
    refused("repetition_detection", _OBJECT),
    accepted_at("watermarking", _BOOLEAN, False),
    accepted_at("watermark", _BOOLEAN, False),
    # Searches and samplers.
    accepted_at("use_beam_search", _BOOLEAN, False),
    accepted_at("length_penalty", _NUMBER, 1.0),
    accepted_at("early_stopping", _BOOLEAN, False),
    accepted_at("typical_p", _NUMBER, 1.0),
    accepted_at("tfs_z", _NUMBER, 1.0),
    accepted_at("dynatemp_range", _NUMBER, 0.0),
    accepted("dynatemp_exponent", _NUMBER, _METHOD_OFF),
    accepted_at("dry_multiplier", _NUMBER, 0.0),
    accepted("dry_base", _NUMBER, _METHOD_OFF),
    accepted("dry_allowed_length", _INTEGER, _METHOD_OFF),
    accepted("dry_penalty_last_n", _INTEGER, _METHOD_OFF),
    accepted("dry_sequence_breakers", _LIST, _METHOD_OFF),
    accepted_at("xtc_probability", _NUMBER, 0.0),
    accepted("xtc_threshold", _NUMBER, _METHOD_OFF),
    accepted_at("mirostat", _INTEGER, 0),
    accepted("mirostat_tau", _NUMBER, _METHOD_OFF),
    accepted("mirostat_eta", _NUMBER, _METHOD_OFF),
    accepted_at("min_keep", _INTEGER, 0),
    refused("repeat_penalty", _NUMBER, "Send 'repetition_penalty'."),
    accepted_at("repeat_last_n", _INTEGER, -1, note="Penalties apply to all tokens."),
    refused("samplers", _LIST),
    refused("sampling_seed", _INTEGER, "Send 'seed'."),
    refused("do_sample", _BOOLEAN, "Send 'temperature', which is 0 for greedy decoding."),
    # The length and the end of the answer.
    refused("max_new_tokens", _INTEGER, "Send 'max_tokens'."),
    refused("num_predict", _INTEGER, "Send 'max_tokens'."),
    refused("n_predict", _INTEGER, "Send 'max_tokens'."),
    accepted_at("n_cmpl", _INTEGER, 1, note="Send 'n'."),
    accepted_at("t_max_predict_ms", _INTEGER, 0),
    accepted_at("n_indent", _INTEGER, 0),
    accepted_at("stop_regex", _STRING | _LIST, []),
    refused("stop_sequences", _LIST, "Send 'stop'."),
    accepted_at("include_stop_str_in_output", _BOOLEAN, False),
    accepted_at("no_stop_trim", _BOOLEAN, False),
    # Text and tokens.
    accepted("spaces_between_special_tokens", _BOOLEAN, "Spaces are those that the tokenizer's decoder writes."),
    accepted_at("truncation_side", _STRING, "left", note="A prompt keeps its last tokens."),
    accepted_at("n_keep", _INTEGER, 0),
    accepted_at("n_discard", _INTEGER, 0),
    refused("num_ctx", _INTEGER, "The context is fixed when the server starts (--max-model-len)."),
    # Output besides the text.
    refused("logprob_token_ids", _LIST),
    accepted_at("n_probs", _INTEGER, 0, note="Send 'logprobs'."),
    accepted_at("post_sampling_probs", _BOOLEAN, False),
    accepted_at("return_tokens", _BOOLEAN, False, note="Send 'return_token_ids'."),
    accepted_at("return_tokens_as_token_ids", _BOOLEAN, False),
    accepted_at("return_token_offsets", _BOOLEAN, False),
    accepted("return_mm_kwargs", _BOOLEAN, "Only text is read."),
    accepted_at("return_hidden_states", _BOOLEAN | _STRING, False),
    accepted_at("return_routed_experts", _BOOLEAN, False),
    accepted_at("routed_experts_start_len", _INTEGER, 0),
    accepted_at("routed_experts_prompt_start", _INTEGER, 0),
    accepted_at("return_cached_tokens_details", _BOOLEAN, False),
    accepted_at("return_full_text", _BOOLEAN, False),
    accepted_at("details", _BOOLEAN, False),
    accepted_at("timings_per_token", _BOOLEAN, False),
    accepted_at("return_progress", _BOOLEAN, False),
    accepted_at("response_fields", _LIST, []),
    accepted_at("stream_interval", _INTEGER, 1),
    refused("sse_ping_interval", _INTEGER, "The server's 'keep_alive_seconds' sets it."),
    # Reasoning.
    accepted_at("thinking_token_budget", _INTEGER, -1, note="Send 'max_reasoning_tokens'."),
    # Adapters, images, sessions.
    refused("lora_path", _STRING | _LIST),
    accepted_at("lora", _LIST, []),
    refused("adapter_id", _STRING),
    accepted_at("images_config", _OBJECT, {}),
    accepted_at("session_params", _OBJECT, {}),
    refused("request_id", _STRING, "Send the header 'X-Request-Id'."),
    refused("rid", _STRING | _LIST, "Send the header 'X-Request-Id'."),
    # Scheduling, placement and caches.
    accepted_at("cache_prompt", _BOOLEAN, True, note="Prefixes are always cached."),
    accepted_at("n_cache_reuse", _INTEGER, 0),
    refused("cache_salt", _STRING | _LIST, "Prefixes are shared per API key."),
    refused("extra_key", _STRING | _LIST),
    accepted("routing_id", _STRING, "A hint for a gateway."),
    accepted_at("id_slot", _INTEGER, -1, note=_ROUTER_PLACES),
    refused("ngram_corpus_id", _STRING | _LIST),
    *(
        refused(name, _INTEGER | _STRING | _LIST, _ROUTER_PLACES)
        for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room")
    ),
    *(
        refused(name, _INTEGER, _ROUTER_PLACES)
        for name in ("routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank")
    ),
    refused("kv_transfer_params", _OBJECT, _ROUTER_PLACES),
    refused("ec_transfer_params", _OBJECT, _ROUTER_PLACES),
    accepted("keep_alive", _STRING | _NUMBER, "The model stays loaded."),
    accepted_at("options", _OBJECT, {}, note="Send its members as fields of the body."),
    accepted_at("extra_body", _OBJECT, {}, note="Send its members as fields of the body."),
)

CHAT: tuple[RestrictedField, ...] = (
    # Tools.
    accepted_at("functions", _LIST, [], note="Send 'tools'."),
    accepted_at("function_call", _STRING | _OBJECT, "none", "auto", note="Send 'tool_choice'."),
    refused("tool_prompt", _STRING, "The model's own template is used."),
    refused("web_search_options", _OBJECT),
    # Kinds of answers.
    accepted_at("modalities", _LIST, ["text"]),
    refused("audio", _OBJECT),
    refused("prediction", _OBJECT),
    refused("moderation", _OBJECT),
    accepted_at("verbosity", _STRING, "medium"),
    accepted_at("store", _BOOLEAN, False),
    accepted_at("service_tier", _STRING, "auto", "default"),
    accepted_at("prompt_cache_retention", _STRING, "in_memory"),
    accepted_at("prompt_cache_options", _OBJECT, {}, {"mode": "implicit"}),
    # Reasoning.
    refused("reasoning", _OBJECT),
    refused("thinking", _OBJECT),
    refused("enable_thinking", _BOOLEAN),
    refused("think", _BOOLEAN | _STRING),
    accepted_at("separate_reasoning", _BOOLEAN, True),
    accepted_at("stream_reasoning", _BOOLEAN, True),
    accepted_at("reasoning_format", _STRING, "auto", "deepseek"),
    # Templates.
    refused("chat_template", _STRING, "The model's own template is used."),
    accepted_at("add_special_tokens", _BOOLEAN, False),
    accepted_at("echo", _BOOLEAN, False),
    accepted_at("safe_prompt", _BOOLEAN, False),
    refused("guideline", _STRING),
    refused("task", _STRING),
    refused("input_ids", _LIST),
    accepted_at("return_prompt_text", _BOOLEAN, False),
    accepted_at("return_prompt_token_ids", _BOOLEAN, False),
    accepted_at("return_meta_info", _BOOLEAN, False),
    accepted_at("best_of", _INTEGER, 1),
    # Images, audio, video.
    accepted_at("mm_processor_kwargs", _OBJECT, {}),
    accepted_at("media_io_kwargs", _OBJECT, {}),
    refused("max_dynamic_patch", _INTEGER),
    refused("min_dynamic_patch", _INTEGER),
    accepted_at("use_audio_in_video", _BOOLEAN, False),
)

COMPLETIONS: tuple[RestrictedField, ...] = (
    accepted_at("custom_labels", _OBJECT, {}),
    accepted_at("suffix", _STRING, ""),
    refused("prompt_embeds", _STRING | _LIST),
    accepted_at("add_special_tokens", _BOOLEAN, True),
    refused("max_completion_tokens", _INTEGER, "Send 'max_tokens'."),
)


def _by_name(*rows: RestrictedField) -> dict[str, RestrictedField]:
    return {row.name: row for row in rows}


HONOURED: dict[Scope, frozenset[str]] = {scope: frozenset(scope.model.model_fields) for scope in Scope}
RESTRICTED: dict[Scope, dict[str, RestrictedField]] = {
    Scope.CHAT: _by_name(*BOTH, *CHAT),
    Scope.COMPLETIONS: _by_name(*BOTH, *COMPLETIONS),
    Scope.STREAM_OPTIONS: _by_name(*STREAM_OPTIONS),
    Scope.MESSAGE: _by_name(*MESSAGE),
    Scope.PART: _by_name(*PART),
}
