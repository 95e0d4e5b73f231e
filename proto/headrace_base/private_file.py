"""Files and folders with keys, secrets and state: used only if no other user can change them, or read a secret.

`ssh` has the same rule. Two kinds of files are accepted besides: files of root that all can read, mounted read-only, as
Kubernetes and Docker mount Secrets by default; and files of root that the group of a service can read (0640
root:service).
"""

import os
import stat
import tempfile
from pathlib import Path

from headrace_base.errors import HeadraceError

MAX_BYTES = 1 << 20
_ROOT = 0


class PrivateFileError(HeadraceError):
    """A file with a key or a secret can be read or changed by others; the sentence has the command that repairs it."""


def read_private(path: Path, what: str, *, follow_link: bool = True, secret: bool = True) -> bytes:
    """The bytes of a file with a key or a secret; `what` names it in errors: 'the file of API keys'.

    secret: False for a file that all may read and that only its owner may change, such as a certificate authority's.
    What is checked is what is read, also if the file is replaced meanwhile. Raises OSError, PrivateFileError.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe must not block
    descriptor = os.open(path, flags if follow_link else flags | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        read_only = os.fstatvfs(descriptor).f_flag & os.ST_RDONLY
        if problem := file_problem(os.fstat(descriptor), os.geteuid(), hidden=secret and not read_only):
            raise PrivateFileError(f"{what} {path} is not used: {problem.format(path=path)}")
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise PrivateFileError(f"{what} {path} is not used: it is larger than 1 MiB; is this the right file?")
    return content


def write_private(path: Path, content: bytes) -> None:
    """Writes a file that only its owner can read; it has the earlier or the new content at any time. Raises OSError."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # created with mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)  # some file systems would have an empty file after a loss of power
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def file_problem(status: os.stat_result, user: int, *, hidden: bool) -> str:
    """Why `user` must not use a file, with the remedy, in which {path} stands for it; empty: it may.

    hidden: others must not read it either.
    """
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode):
        return "it is no regular file"
    if status.st_uid not in (_ROOT, user):
        return "it belongs to another user, who can change it: copy it, or `chown` it to the user of this process"
    if mode & 0o022:
        return f"other users can change it: chmod {'600' if hidden else 'go-w'} {{path}}"
    if not hidden:
        return ""
    if status.st_uid == _ROOT != user:
        return "every user of this machine can read it: chmod 640 {path}" if mode & 0o004 else ""
    return "other users of this machine can read it: chmod 600 {path}" if mode & 0o044 else ""


def folder_problem(status: os.stat_result, user: int) -> str:
    """Why `user` must not keep state in a folder, with the remedy, in which {path} stands for it; empty: it may."""
    if status.st_uid not in (_ROOT, user):
        return "it belongs to another user, who can change what is in it"
    return "other users can change what is in it: chmod 700 {path}" if status.st_mode & 0o022 else ""
