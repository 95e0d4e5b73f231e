"""The fields of a body's inner objects that are not implemented. Data only."""

from headrace_router.validation.fields.json_kind import JsonKind
from headrace_router.validation.fields.restricted_field import RestrictedField, accepted, accepted_at, refused

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
