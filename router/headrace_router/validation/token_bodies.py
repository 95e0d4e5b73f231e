"""The bodies of /tokenize and /detokenize, as vLLM has them."""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr, ValidationError

from headrace_router.core.errors import InvalidRequestError
from headrace_router.core.limits import Limits
from headrace_router.validation.bodies import ChatBody, TokenId
from headrace_router.validation.body_errors import as_api_error, parse_body


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    model: StrictStr = Field(min_length=1, max_length=512)


class TokenizeBody(_Body):
    """POST /tokenize, of a text; with `messages` instead of `prompt` it takes the fields of a chat."""

    prompt: StrictStr
    add_special_tokens: StrictBool = Field(default=True, description="those that the tokenizer puts around a prompt")
    return_token_strs: StrictBool = Field(default=False, description="adds token_strs, as the vocabulary has them")


class DetokenizeBody(_Body):
    """POST /detokenize."""

    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


Body = TypeVar("Body", bound=_Body)


def parse_tokenize(value: Any, limits: Limits, model: str | None) -> tuple[TokenizeBody | ChatBody, bool]:
    """The text or the chat, and whether the strings of the tokens are wanted. model: where the body names none.

    Raises InvalidRequestError or UnsupportedError with `param` set.
    """
    given = _given(value, model)
    if ("messages" in given) is ("prompt" in given):
        raise InvalidRequestError("Send 'prompt', a text, or 'messages', a chat.", param="prompt")
    if "messages" not in given:
        body = _parsed(TokenizeBody, given)
        return body, body.return_token_strs
    strings = given.pop("return_token_strs", False)
    if not isinstance(strings, bool):
        raise InvalidRequestError("'return_token_strs' must be true or false.", param="return_token_strs")
    return parse_body(ChatBody, given, limits), strings


def parse_detokenize(value: Any, model: str | None) -> DetokenizeBody:
    """model: where the body names none. Raises InvalidRequestError with `param` set."""
    return _parsed(DetokenizeBody, _given(value, model))


def _given(value: Any, model: str | None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequestError("The body must be a JSON object.")
    named = {"model": model} if model is not None else {}
    return named | {name: entry for name, entry in value.items() if entry is not None}


def _parsed(kind: type[Body], given: dict[str, Any]) -> Body:
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise as_api_error(error) from None
