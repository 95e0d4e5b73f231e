"""Members of a cluster: the file with its secret, calls with it and without, its change, and TLS from files."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from headrace_base import cluster_member
from headrace_base.cluster_member import (
    NO_PROXY,
    ClusterMember,
    ClusterSecret,
    InternalTlsError,
    SecretFile,
    SecretFileError,
)
from headrace_base.private_file import PrivateFileError
from headrace_base.settings import InternalTls
from headrace_proto.control_pb2 import RouterReport
from headrace_proto.control_pb2_grpc import ControlStub
from support.certificates import Authority
from support.members import other_member
from support.router.control_server import ControlServer

OLD, NEW = b"the first secret of a cluster", b"the second secret of a cluster"


@pytest.fixture(autouse=True)
def private_files() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(OLD + b"\n")
    return path


def test_secrets_are_lines_of_a_private_file(path: Path) -> None:
    file = SecretFile(path)
    assert file.secret.values == (OLD,) and not file.reread()
    path.write_bytes(NEW + b"\n" + OLD)
    assert file.reread() and file.secret.values == (NEW, OLD)
    path.chmod(0o644)
    with pytest.raises(PrivateFileError, match="chmod 600"):
        SecretFile(path)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"short\n", "16 bytes"), (b"\n", "0 lines"), (b"\n".join([OLD, NEW, OLD]), "3 lines"), (None, "No such file")],
)
def test_a_file_that_cannot_be_used_changes_nothing(path: Path, content: bytes | None, sentence: str) -> None:
    file = SecretFile(path)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SecretFileError, match=sentence):
        file.reread()
    assert file.secret.values == (OLD,)
    with pytest.raises(SecretFileError, match=sentence):
        SecretFile(path)


def test_a_file_is_watched_and_a_problem_is_told_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_member, "WATCH_SECONDS", 0.005)
    file, warnings = SecretFile(path), list[str]()
    warned, changed = asyncio.Event(), asyncio.Event()

    def warn(problem: str) -> None:
        warnings.append(problem)
        warned.set()

    async def run() -> None:
        watching = asyncio.create_task(file.watch(changed.set, warn))
        async with asyncio.timeout(20):
            await warned.wait()
            await asyncio.sleep(0.05)
            assert len(warnings) == 1 and "what it had before stays valid" in warnings[0] and not changed.is_set()
            replace(NEW)
            await changed.wait()
        watching.cancel()

    def replace(content: bytes) -> None:
        path.write_bytes(content)

    replace(b"short")

    asyncio.run(run())
    assert file.secret.values == (NEW,)


def test_only_calls_with_one_of_the_values_are_accepted() -> None:
    secret = ClusterSecret((NEW, OLD))
    (key, _), _ = secret.metadata
    assert all(secret.accepts([("user-agent", "x"), (key, value)]) for value in (OLD, NEW))
    for metadata in ([], [(key, NEW[:-1])], [(key, NEW + b"x")], [(key, b"")], [(key, OLD.decode())]):
        assert not secret.accepts(metadata)
    assert secret.accepts([(key, b"another"), (key, OLD)]) and not secret.accepts(
        [(key, b"another")] * 2 + [(key, OLD)]
    )


async def _report(member: ClusterMember, address: str) -> grpc.StatusCode:
    """What a call of this member to a controller ends with."""
    async with member.channel(address, NO_PROXY) as channel:
        stub: Any = ControlStub(channel)
        try:
            await stub.Report(RouterReport(router_id="r"), metadata=member.metadata, timeout=20)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def test_members_talk_at_each_step_of_a_change() -> None:
    async def run() -> None:
        for own, others, expected in (
            ((OLD,), (OLD,), grpc.StatusCode.OK),
            ((OLD,), (NEW, OLD), grpc.StatusCode.OK),
            ((NEW, OLD), (OLD,), grpc.StatusCode.OK),
            ((NEW, OLD), (NEW, OLD), grpc.StatusCode.OK),
            ((NEW,), (NEW, OLD), grpc.StatusCode.OK),
            ((NEW,), (OLD,), grpc.StatusCode.UNAUTHENTICATED),
        ):
            async with ControlServer(other_member(*own)) as controller:
                assert await _report(other_member(*others), controller.address) is expected

    asyncio.run(run())


def _tls(authority: Authority, name: str) -> InternalTls:
    cert, key = authority.issue(name)
    return InternalTls(str(cert), str(key), str(authority.file))


def test_tls_from_files_is_mutual_and_follows_the_files(tmp_path: Path) -> None:
    ours, foreign = Authority(tmp_path), Authority(tmp_path, "another")
    secret = ClusterSecret((OLD,))
    files, own = _tls(ours, "controller"), _tls(ours, "router")
    controller, router = ClusterMember(secret, files), ClusterMember(secret, own)
    other = _tls(foreign, "stranger")
    stranger = ClusterMember(secret, InternalTls(other.cert, other.key, files.ca))

    def replace_files() -> None:
        new = Authority(tmp_path, "new")
        for member in (files, own):
            new.issue("member", cert=Path(member.cert), key=Path(member.key))
        Path(files.ca).write_bytes(new.file.read_bytes())

    async def run() -> None:
        async with ControlServer(controller) as server:
            assert await _report(router, server.address) is grpc.StatusCode.OK
            assert await _report(ClusterMember(ClusterSecret((NEW,)), files), server.address) is (
                grpc.StatusCode.UNAUTHENTICATED
            )
            for outsider in (ClusterMember(secret), stranger):
                assert await _report(outsider, server.address) is grpc.StatusCode.UNAVAILABLE
            replace_files()
            assert await _report(router, server.address) is grpc.StatusCode.OK

    asyncio.run(run())


def test_files_of_tls_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    files = _tls(Authority(tmp_path), "member")
    Path(files.ca).unlink()
    with pytest.raises(InternalTlsError, match=f"{files.ca} of internal.tls cannot be read"):
        ClusterMember(ClusterSecret((OLD,)), files).channel("127.0.0.1:1")
