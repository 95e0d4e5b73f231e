"""Files with keys and secrets are read only if no other user can read or change them."""

import os
import stat
from pathlib import Path

import pytest

from headrace_base.private_file import MAX_BYTES, PrivateFileError, file_problem, folder_problem, read_private

ROOT, ME, OTHER = 0, 1000, 1001


def _status(mode: int, owner: int, kind: int = stat.S_IFREG) -> os.stat_result:
    return os.stat_result((kind | mode, 1, 1, 1, owner, owner, 9, 0, 0, 0))


@pytest.mark.parametrize(
    "mode, owner, user, hidden, problem",
    [
        (0o600, ME, ME, True, ""),
        (0o640, ME, ME, True, "chmod 600"),
        (0o602, ME, ME, True, "change it: chmod 600"),
        (0o600, OTHER, ME, True, "another user"),
        # root gives a service a file through its group
        (0o640, ROOT, ME, True, ""),
        (0o644, ROOT, ME, True, "chmod 640"),
        # Secrets as Kubernetes mounts them: read-only, of root, by default readable by all
        (0o644, ROOT, ME, False, ""),
        (0o666, ROOT, ME, False, "change it"),
    ],
)
def test_owner_and_mode_decide(mode: int, owner: int, user: int, hidden: bool, problem: str) -> None:
    found = file_problem(_status(mode, owner), user, hidden=hidden)
    assert problem in found and bool(problem) == bool(found)


@pytest.mark.parametrize(
    "mode, owner, problem",
    [(0o700, ME, ""), (0o755, ROOT, ""), (0o770, ME, "chmod 700"), (0o777, ROOT, "chmod 700"), (0o700, OTHER, "user")],
)
def test_a_folder_must_not_be_writable_by_others(mode: int, owner: int, problem: str) -> None:
    found = folder_problem(_status(mode, owner, stat.S_IFDIR), ME)
    assert problem in found and bool(problem) == bool(found)


def test_the_error_has_the_command_that_repairs_it(tmp_path: Path) -> None:
    path = tmp_path / "a {key}"
    path.write_bytes(b"secret")
    path.chmod(0o644)
    with pytest.raises(PrivateFileError) as refused:
        read_private(path, "the file of API keys")
    assert str(refused.value).endswith(f"chmod 600 {path}") and "the file of API keys" in str(refused.value)
    path.chmod(0o600)
    assert read_private(path, "it") == b"secret"


def test_a_link_is_followed_only_where_the_operator_named_the_path(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.touch(mode=0o600)
    link.symlink_to(target)
    assert read_private(link, "it") == b""
    with pytest.raises(OSError, match="symbolic link"):
        read_private(link, "it", follow_link=False)


def test_pipes_and_huge_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(PrivateFileError, match="no regular file"):
        read_private(tmp_path / "pipe", "it")
    (tmp_path / "huge").touch(mode=0o600)
    os.truncate(tmp_path / "huge", MAX_BYTES + 1)
    with pytest.raises(PrivateFileError, match="1 MiB"):
        read_private(tmp_path / "huge", "it")
