"""Every failure that a client may see: its HTTP status, OpenAI error object and gRPC code in one place."""

from typing import Any

from headrace_proto.errors import HeadraceError

MAX_MESSAGE_CHARS = 2000  # keeps an error body under 8 KiB, whatever the JSON escapes (RELIABILITY R15)


class ApiError(HeadraceError):
    """A failure with a sentence for the client. Subclasses set status and codes; the message never quotes prompts."""

    status = 500
    kind = "server_error"
    code: str | None = "internal_error"
    grpc_code: str = "INTERNAL"  # the name of a grpc.StatusCode
    retry_after: int | None = None  # seconds

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message if len(message) <= MAX_MESSAGE_CHARS else message[: MAX_MESSAGE_CHARS - 1] + "…"
        self.param = param if param is None or len(param) <= 200 else param[:199] + "…"
        if code is not None:
            self.code = code

    def body(self) -> dict[str, Any]:
        """The OpenAI error object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


class InvalidRequestError(ApiError):
    """The request is wrong; sending it again will not help."""

    status = 400
    kind = "invalid_request_error"
    code: str | None = None
    grpc_code = "INVALID_ARGUMENT"


class ContextLengthError(InvalidRequestError):
    """Prompt, or prompt and output together, do not fit the model's context."""

    code = "context_length_exceeded"


class UnsupportedError(InvalidRequestError):
    """A field of the API that this server does not implement: refused by name, never ignored."""

    code = "unsupported_parameter"


class AuthenticationError(ApiError):
    """No API key, or an unknown one."""

    status = 401
    kind = "invalid_request_error"
    code = "invalid_api_key"
    grpc_code = "UNAUTHENTICATED"


class NotFoundError(ApiError):
    """No such route."""

    status = 404
    kind = "invalid_request_error"
    code = "not_found"
    grpc_code = "NOT_FOUND"


class ModelNotFoundError(NotFoundError):
    """No such model."""

    code = "model_not_found"


class MethodNotAllowedError(ApiError):
    """The route exists, for other methods."""

    status = 405
    kind = "invalid_request_error"
    code = "method_not_allowed"
    grpc_code = "UNIMPLEMENTED"


class RequestTimeoutError(ApiError):
    """The client did not send its body in time."""

    status = 408
    kind = "invalid_request_error"
    code = "request_timeout"
    grpc_code = "DEADLINE_EXCEEDED"


class BodyTooLargeError(ApiError):
    """The body exceeds the limit."""

    status = 413
    kind = "invalid_request_error"
    code = "request_too_large"
    grpc_code = "RESOURCE_EXHAUSTED"


class MediaTypeError(ApiError):
    """The body is not declared as plain application/json."""

    status = 415
    kind = "invalid_request_error"
    code = "unsupported_media_type"
    grpc_code = "INVALID_ARGUMENT"


class QuotaError(ApiError):
    """The caller's own limit is reached (429)."""

    status = 429
    kind = "rate_limit_error"
    code = "rate_limit_exceeded"
    grpc_code = "RESOURCE_EXHAUSTED"
    retry_after = 1


class OverloadedError(ApiError):
    """The server has no capacity now (503); the same request may succeed later."""

    status = 503
    kind = "overloaded_error"
    code = "overloaded"
    grpc_code = "RESOURCE_EXHAUSTED"
    retry_after = 1


class NoReplicaError(OverloadedError):
    """No replica of the model is ready."""

    code = "no_replica_ready"
    grpc_code = "UNAVAILABLE"
    retry_after = 2


class ReplicaLostError(OverloadedError):
    """The replica that ran the request was lost."""

    kind = "server_error"
    code = "replica_lost"
    grpc_code = "UNAVAILABLE"


class DeadlineError(ApiError):
    """The request's deadline passed."""

    status = 504
    code = "deadline_exceeded"
    grpc_code = "DEADLINE_EXCEEDED"


class GenerationFailedError(ApiError):
    """The replica failed this request; its other requests continue."""

    code = "generation_failed"


class InternalError(ApiError):
    """A bug of ours; details are in the log under the request's id."""
