"""The cluster's secrets: from the operator's file, or generated for a cluster that has none."""

import secrets
from pathlib import Path

from headrace_cluster.errors import SpecError
from headrace_cluster.local.state import write_private
from headrace_proto.private_file import read_private

MIN_BYTES = 16
MAX_SECRETS = 2


class ClusterSecrets:
    """The secrets that are valid, the one that signs first. For one thread; any may read `current`."""

    def __init__(self, path: Path | None) -> None:
        """path: none = a new secret, in memory until `save`. Raises SpecError when the file cannot be used."""
        self._path = path
        self.current = _read(path) if path is not None else (secrets.token_hex(32).encode(),)

    def save(self, path: Path) -> None:
        """Keeps generated secrets in a private file, unless they are from there. Raises StateError."""
        if path != self._path:
            write_private(path, "".join(f"{secret.decode()}\n" for secret in self.current))
            self._path = path

    def reread(self) -> bool:
        """Whether the file has other secrets than before, which are `current` then. Raises SpecError."""
        found = _read(self._path) if self._path is not None else self.current
        changed, self.current = found != self.current, found
        return changed


def _read(path: Path) -> tuple[bytes, ...]:
    try:
        lines = [stripped for line in read_private(path, "the secret file").split(b"\n") if (stripped := line.strip())]
    except OSError as error:
        raise SpecError(f"the secret file {path} cannot be read: {error.strerror}") from error
    if not 1 <= len(lines) <= MAX_SECRETS:
        raise SpecError(
            f"the secret file {path} has {len(lines)} lines: put the secret on the first, and one that stays valid "
            "for a while on the second"
        )
    if min(map(len, lines)) < MIN_BYTES:
        raise SpecError(f"a secret in {path} is too short: put {MIN_BYTES} bytes or more on each line")
    return tuple(lines)
