"""What tests need to be members of one cluster: its secret, also as a file."""

import atexit
import tempfile
from functools import cache
from pathlib import Path

from headrace_base.cluster_member import ClusterMember, ClusterSecret

SECRET = b"the secret of every cluster in tests"
MEMBER = ClusterMember(ClusterSecret((SECRET,)))
METADATA = MEMBER.metadata


def other_member(*secrets: bytes) -> ClusterMember:
    """A process with these secrets."""
    return ClusterMember(ClusterSecret(secrets or (b"the secret of another cluster",)))


@cache
def secret_file() -> Path:
    """It has SECRET, and is removed at the end of this process."""
    folder = tempfile.TemporaryDirectory(prefix="headrace-secret-")
    atexit.register(folder.cleanup)
    path = Path(folder.name) / "secret"
    path.touch(mode=0o600)
    path.write_bytes(SECRET + b"\n")
    return path
