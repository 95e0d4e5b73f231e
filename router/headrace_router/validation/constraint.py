"""Which constraint of the answer a body asks for: one, by whichever name."""

import json
from collections.abc import Callable
from typing import Any

from headrace_router.answer.grammar import choice_grammar, regex_grammar, schema_grammar, text_grammar
from headrace_router.core.errors import InvalidRequestError
from headrace_router.validation.bodies import RequestOptions


def grammar_of(body: RequestOptions, most: int) -> tuple[str, str]:
    """The grammar that the answer must follow and the field that asks for it; empty without one.

    most: bytes of the constraint. Raises InvalidRequestError.
    """
    given = {name: value for name, value in _constraints(body).items() if value is not None}
    if len(given) > 1:
        first, second, *_ = given
        raise InvalidRequestError(
            f"'{first}' and '{second}' both constrain the answer: send one of them.", param=second
        )
    for field, (make, value) in given.items():
        size = len(value.encode() if isinstance(value, str) else json.dumps(value).encode())
        if size > most:
            raise InvalidRequestError(f"'{field}' has {size} bytes; this server accepts {most}.", param=field)
        try:
            return make(value), field
        except ValueError as error:
            raise InvalidRequestError(f"'{field}' is not valid: {str(error)[:200]}.", param=field) from None
    return "", ""


def _constraints(body: RequestOptions) -> dict[str, tuple[Callable[[Any], str], Any] | None]:
    """By the name of the field: how its grammar is made, and its value."""
    found: dict[str, tuple[Callable[[Any], str], Any] | None] = {}
    response = body.response_format
    schema = None
    if response is not None:
        schema = response.schema_ if response.json_schema is None else response.json_schema.schema_
    if response is not None and response.json_schema is not None and response.type != "json_schema":
        raise InvalidRequestError(
            "'response_format.json_schema' needs 'response_format.type' to be json_schema.",
            param="response_format.type",
        )
    if response is not None and response.type == "json_object":
        found["response_format"] = schema_grammar, {"type": "object"} if schema is None else schema
    elif response is not None and response.type == "json_schema":
        if schema is None:
            raise InvalidRequestError(
                "'response_format.json_schema.schema' is missing: it is the JSON Schema of the answer.",
                param="response_format.json_schema",
            )
        found["response_format"] = schema_grammar, schema
    wanted = body.structured_outputs
    if wanted is not None:
        members: dict[str, tuple[Callable[[Any], str], Any] | None] = {
            "structured_outputs.json": (schema_grammar, wanted.json_) if wanted.json_ is not None else None,
            "structured_outputs.json_object": (schema_grammar, {"type": "object"}) if wanted.json_object else None,
            "structured_outputs.regex": (regex_grammar, wanted.regex) if wanted.regex is not None else None,
            "structured_outputs.choice": (choice_grammar, wanted.choice) if wanted.choice is not None else None,
            "structured_outputs.grammar": (text_grammar, wanted.grammar) if wanted.grammar is not None else None,
        }
        if not any(members.values()):
            raise InvalidRequestError(
                "'structured_outputs' is empty: send json, json_object, regex, choice or grammar in it.",
                param="structured_outputs",
            )
        found |= members
    makers: dict[str, Callable[[Any], str]] = {
        "json": schema_grammar,
        "regex": regex_grammar,
        "choice": choice_grammar,
        "grammar": text_grammar,
    }
    for name, make in makers.items():
        value = getattr(body, f"guided_{name}")
        found[f"guided_{name}"] = (make, value) if value is not None else None
    return found
