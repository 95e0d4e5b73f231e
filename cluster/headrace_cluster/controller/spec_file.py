"""The spec file of a controller, read again when its content changes: also when a link on its path is replaced."""

from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

from headrace_cluster.errors import SpecError
from headrace_cluster.spec.cluster_spec import ClusterSpec


class SpecFile:
    """Only models take effect while the controller runs; the rest does when it starts again."""

    def __init__(
        self,
        path: Path,
        content: bytes,
        spec: ClusterSpec,
        build: Callable[[], ClusterSpec],
        check: Callable[[ClusterSpec], ClusterSpec],
    ) -> None:
        """content: `digest` of the file before the spec was read from it. build: reads it again, with the same flags.

        check: of the models before they are used; returns the spec with commits of the Hub.
        """
        self.path = path
        self._written = spec
        self._build = build
        self._check = check
        self._content = content
        self.problem = ""  # why the file, or a part of it, is not used
        self.refused = False  # all of it

    def reread(self) -> tuple[ClusterSpec, ClusterSpec] | None:
        """The spec as it is written now, and with commits; None while nothing is to change. It blocks."""
        content = digest(self.path)
        if content == self._content:
            return None
        try:
            found = self._build()
            rest = [name for name in type(found).model_fields if name != "models" and self._differs(found, name)]
            if found.cluster != self._written.cluster:
                raise SpecError(f"it names another cluster, '{found.cluster}'")
            written = self._written.model_copy(update={"models": found.models})
            checked = self._check(written)
        except Exception as error:
            if isinstance(error, SpecError):
                self._content = content  # it is read again when it has changed; after other errors, without that
            self.problem = f"the spec file {self.path} is not used, and what it had before stays: {error}"
            self.refused = True
            return None
        self._content, self.problem, self.refused = content, "", False
        if rest:
            self.problem = f"{', '.join(rest)} of the spec file {self.path}: a change takes effect with the next start"
        return written, checked

    def _differs(self, found: ClusterSpec, name: str) -> bool:
        return bool(getattr(found, name) != getattr(self._written, name))


def digest(path: Path) -> bytes:
    """The digest of a file's content; empty if the file cannot be read."""
    try:
        return blake2b(path.read_bytes(), digest_size=16).digest()
    except OSError:
        return b""
