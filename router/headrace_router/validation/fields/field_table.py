"""Every known field, by scope: honoured (declared in the pydantic models) or restricted (the data files here)."""

from headrace_router.validation.fields import body_fields, nested_fields
from headrace_router.validation.fields.restricted_field import RestrictedField
from headrace_router.validation.fields.scope import Scope


def _by_name(*rows: RestrictedField) -> dict[str, RestrictedField]:
    return {row.name: row for row in rows}


HONOURED: dict[Scope, frozenset[str]] = {scope: frozenset(scope.model.model_fields) for scope in Scope}
RESTRICTED: dict[Scope, dict[str, RestrictedField]] = {
    Scope.CHAT: _by_name(*body_fields.BOTH, *body_fields.CHAT),
    Scope.COMPLETIONS: _by_name(*body_fields.BOTH, *body_fields.COMPLETIONS),
    Scope.STREAM_OPTIONS: _by_name(*nested_fields.STREAM_OPTIONS),
    Scope.MESSAGE: _by_name(*nested_fields.MESSAGE),
    Scope.PART: _by_name(*nested_fields.PART),
}
