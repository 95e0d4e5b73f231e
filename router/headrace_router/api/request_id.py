"""The id of a request: of its client, or a random one."""

import re
import secrets

_VALID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


def request_id(given: bytes) -> str:
    """given: what the client sent; empty or invalid = it gets a random one."""
    return given.decode() if _VALID.fullmatch(given) else secrets.token_hex(16)
