"""The session of a request, for placement: of a header, or of the metadata of a gRPC call."""

from collections.abc import Iterable

from headrace_router.config import RouterConfig
from headrace_router.core.errors import InvalidRequestError


def session_of(metadata: Iterable[tuple[bytes | str, bytes | str]] | None, config: RouterConfig) -> str:
    """The first value of the header `config.session_header`, which may be written with underscores; empty = none.

    Raises InvalidRequestError if it has more than `limits.label_bytes` bytes, as for labels in a body.
    """
    name, limit = config.session_header, config.limits.label_bytes
    for given, value in metadata or ():
        key = given.decode("latin-1") if isinstance(given, bytes) else given
        if value and (key == name or key.replace("_", "-") == name.replace("_", "-")):
            text = value.decode("latin-1") if isinstance(value, bytes) else value
            if len(text) > limit:
                raise InvalidRequestError(f"'{name}' has {len(text)} bytes; the limit is {limit}.", param=name)
            return text
    return ""
