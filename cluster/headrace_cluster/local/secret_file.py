"""The cluster's secret: from the operator's file, or generated for a cluster on one machine."""

import secrets
from pathlib import Path

from headrace_cluster.errors import SpecError
from headrace_proto.private_file import read_private

MIN_BYTES = 16


def read_or_generate(path: Path | None) -> bytes:
    """The secret. Raises SpecError when the file cannot be used, PrivateFileError when others could read it."""
    if path is None:
        return secrets.token_hex(32).encode()
    try:
        secret = read_private(path, "the secret file").strip()
    except OSError as error:
        raise SpecError(f"the secret file {path} cannot be read: {error.strerror}") from error
    if len(secret) < MIN_BYTES:
        raise SpecError(f"the secret in {path} is too short: put {MIN_BYTES} bytes or more there")
    return secret
