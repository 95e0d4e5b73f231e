"""Every failure that a client may see, with its HTTP status, OpenAI error object and gRPC code: a table of classes."""

from collections.abc import Mapping
from typing import Any, Self, TypedDict, Unpack

from headrace_base.errors import HeadraceError

MAX_MESSAGE_CHARS = 2000  # keeps an error body under 8 KiB, whatever the JSON escapes


class ErrorRow(TypedDict, total=False):
    """What clients receive besides the sentence."""

    status: int
    kind: str
    code: str | None
    grpc_code: str  # the name of a grpc.StatusCode
    retry_after: int | None  # seconds; None = sending it again will not help, or the client cannot know when


class ApiError(HeadraceError):
    """A failure with a sentence for the client; the message never quotes prompts.

    A subclass states its row as class arguments; what it omits is its parent's.
    """

    status = 500
    kind = "server_error"
    code: str | None = "internal_error"
    grpc_code = "INTERNAL"
    retry_after: int | None = None

    def __init_subclass__(cls, **row: Unpack[ErrorRow]) -> None:
        super().__init_subclass__()
        for name, value in row.items():
            setattr(cls, name, value)

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message if len(message) <= MAX_MESSAGE_CHARS else message[: MAX_MESSAGE_CHARS - 1] + "…"
        self.param = param if param is None or len(param) <= 200 else param[:199] + "…"

    def renamed(self, names: Mapping[str, str]) -> Self:
        """The same with other names of fields."""
        found = type(self).__new__(type(self))
        found.__dict__.update(self.__dict__)
        found.param = names.get(self.param or "", self.param)
        for name, other in names.items():
            found.message = found.message.replace(f"'{name}'", f"'{other}'")
        return found

    def body(self) -> dict[str, Any]:
        """The OpenAI error object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


class InvalidRequestError(ApiError, status=400, kind="invalid_request_error", code=None, grpc_code="INVALID_ARGUMENT"):
    """The request is wrong; sending it again will not help."""


class InvalidValueError(InvalidRequestError, code="invalid_value"):
    """A field has a value of another type, or outside of its range."""


class MissingParameterError(InvalidRequestError, code="missing_required_parameter"):
    """A field that is required is missing."""


class UnknownParameterError(InvalidRequestError, code="unknown_parameter"):
    """A field that no table has."""


class SlowPromptError(InvalidRequestError, code="prompt_too_slow"):
    """Parsing, rendering or tokenizing takes too long."""


class ConstraintError(InvalidRequestError, code="constraint_failed"):
    """The replica cannot follow the constraint of the answer."""


class ContextLengthError(InvalidRequestError, code="context_length_exceeded"):
    """The prompt leaves no token of the model's context, or of the server's limit, for an answer.

    lengths: the prompt's tokens, and the most that it may have; None where characters are counted.
    """

    def __init__(self, message: str, *, param: str | None = None, lengths: tuple[int, int] | None = None) -> None:
        super().__init__(message, param=param)
        self.lengths = lengths


class UnsupportedError(InvalidRequestError, code="unsupported_parameter"):
    """A field of the API that this server does not implement: refused by name, never ignored."""


class ForeignFieldError(UnsupportedError):
    """A field of chats in a body of another API: it is named as the client sent it."""

    def renamed(self, names: Mapping[str, str]) -> Self:
        return self


class MediaTypeError(InvalidRequestError, status=415, code="unsupported_media_type"):
    """The body is not declared as plain application/json."""


class AuthenticationError(InvalidRequestError, status=401, code="invalid_api_key", grpc_code="UNAUTHENTICATED"):
    """No API key, or an unknown one."""


class HostError(InvalidRequestError, status=421, code="host_not_allowed"):
    """The Host header names no address of this machine, and no key is asked for."""


class NotFoundError(InvalidRequestError, status=404, code="not_found", grpc_code="NOT_FOUND"):
    """No such route."""


class ModelNotFoundError(NotFoundError, code="model_not_found"):
    """No such model."""


class MethodNotAllowedError(InvalidRequestError, status=405, code="method_not_allowed", grpc_code="UNIMPLEMENTED"):
    """The route exists, for other methods."""


class RequestTimeoutError(InvalidRequestError, status=408, code="request_timeout", grpc_code="DEADLINE_EXCEEDED"):
    """The client did not send its body in time."""


class BodyTooLargeError(InvalidRequestError, status=413, code="request_too_large", grpc_code="RESOURCE_EXHAUSTED"):
    """The body exceeds the limit."""


class QuotaError(
    ApiError,
    status=429,
    kind="rate_limit_error",
    code="rate_limit_exceeded",
    grpc_code="RESOURCE_EXHAUSTED",
    retry_after=1,
):
    """The caller's own limit is reached."""


class OverloadedError(
    ApiError, status=503, kind="overloaded_error", code="overloaded", grpc_code="RESOURCE_EXHAUSTED", retry_after=1
):
    """The server has no capacity now; the same request may succeed later."""


class NoReplicaError(OverloadedError, code="no_replica_ready", grpc_code="UNAVAILABLE", retry_after=2):
    """No replica of the model is ready."""


class DrainedError(NoReplicaError, code="model_drained", retry_after=None):
    """An operator drained all replicas of the model."""


class ReplicaLostError(OverloadedError, kind="server_error", code="replica_lost", grpc_code="UNAVAILABLE"):
    """The replica that ran the request was lost."""


class RevisionReplacedError(ReplicaLostError, code="revision_replaced"):
    """The revision of the model that began the answer was replaced by another one, which cannot continue it."""


class ReplicasLostError(
    ReplicaLostError,
    status=422,
    kind="invalid_request_error",
    code="replicas_lost",
    grpc_code="FAILED_PRECONDITION",
    retry_after=None,
):
    """Several replicas were lost while this request ran: it may be the cause, and clients must not repeat it."""


class DeadlineError(ApiError, status=504, code="deadline_exceeded", grpc_code="DEADLINE_EXCEEDED"):
    """The request's deadline passed."""


class GenerationFailedError(ApiError, code="generation_failed"):
    """The replica failed this request; its other requests continue."""


class InternalError(ApiError):
    """A bug of ours; details are in the log under the request's id."""


def error_rows() -> set[tuple[int, str]]:
    """The status and the code of each class of errors, empty without a code."""
    rows, classes = set[tuple[int, str]](), [ApiError]
    while classes:
        error = classes.pop()
        rows.add((error.status, error.code or ""))
        classes += error.__subclasses__()
    return rows
