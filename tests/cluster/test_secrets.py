"""The cluster's secrets: where they are read, which processes receive them, and how they are replaced meanwhile."""

import asyncio
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509

from headrace_cluster.cli.router import run_router, write_credentials
from headrace_cluster.controller import certificates
from headrace_cluster.controller.control_service import start_control_server
from headrace_cluster.controller.health import watch_health
from headrace_cluster.controller.members import Membership
from headrace_cluster.controller.supervisor import Supervisor
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.errors import SpecError
from headrace_cluster.local.authority import ClusterAuthority
from headrace_cluster.local.router_credentials import issue_credentials, issuer
from headrace_cluster.local.secret_file import ClusterSecrets
from headrace_cluster.local.state import ServeState
from headrace_cluster.spec.cluster_spec import parse_spec
from headrace_proto import control_pb2, control_pb2_grpc
from headrace_proto.channel_options import NO_PROXY
from headrace_proto.component import Certificate, Component
from headrace_proto.identity import Identity
from headrace_proto.private_file import PrivateFileError
from headrace_router.config import RouterConfig
from headrace_router.credentials import RouterCredentials
from headrace_router.replicas.router_certificate import RouterCertificate
from support import identities
from support.cluster.fake_driver import FakeDriver

OLD, NEW = b"the first secret of a cluster", b"the second secret of a cluster"
Eventually = Callable[..., Any]


@pytest.fixture(autouse=True)
def private_files() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(OLD)
    path.chmod(0o644)
    with pytest.raises(PrivateFileError, match="chmod 600"):
        ClusterSecrets(path)


def test_secrets_are_lines_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(OLD + b"\n")
    secrets = ClusterSecrets(path)
    assert secrets.current == (OLD,) and not secrets.reread()
    path.write_bytes(NEW + b"\n" + OLD)
    assert secrets.reread() and secrets.current == (NEW, OLD)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"short\n", "16 bytes"), (b"\n", "0 lines"), (b"\n".join([OLD, NEW, OLD]), "3 lines"), (None, "No such file")],
)
def test_a_file_that_cannot_be_used_changes_nothing(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    path = tmp_path / "secret"
    path.write_bytes(OLD)
    secrets = ClusterSecrets(path)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SpecError, match=sentence):
        secrets.reread()
    assert secrets.current == (OLD,)
    with pytest.raises(SpecError, match=sentence):
        ClusterSecrets(path)


def test_a_generated_secret_is_kept_in_a_private_file(tmp_path: Path) -> None:
    secrets, path = ClusterSecrets(None), tmp_path / "kept"
    assert not secrets.reread() and secrets.current != ClusterSecrets(None).current
    secrets.save(path)
    assert ClusterSecrets(path).current == secrets.current and path.stat().st_mode & 0o77 == 0
    path.write_bytes(NEW)
    assert secrets.reread() and secrets.current == (NEW,)


def test_credentials_of_a_router_are_made_from_the_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, secret_file = tmp_path / "credentials", tmp_path / "secret"
    secret_file.write_bytes(OLD)
    write_credentials(path, secret_file)
    assert f"router --controller HOST:PORT --credentials {path}" in capsys.readouterr().err
    made = RouterCredentials.read(path)
    assert OLD not in path.read_bytes()
    assert Identity.restore(made.identity).certificate.authorities == identities.authority((OLD,)).fingerprints
    assert made.name.startswith("router-")
    with pytest.raises(SpecError, match="cannot be written"):
        write_credentials(tmp_path / "no folder" / "credentials", secret_file)
    with pytest.raises(SpecError, match="two routers do not share"):
        write_credentials(path, secret_file)
    servers: list[Any] = []
    monkeypatch.setattr("headrace_cluster.cli.router.state.running", lambda: servers)
    with pytest.raises(SpecError, match=r"--secret-file FILE.*no server of yours runs"):
        write_credentials(tmp_path / "other", None)
    servers.append(ServeState(7, 7, "headrace", "", "", 8002, secret_file=str(secret_file)))
    write_credentials(tmp_path / "other", None)
    assert RouterCredentials.read(tmp_path / "other").name != made.name
    servers.append(servers[0])
    with pytest.raises(SpecError, match="process 7"):
        write_credentials(tmp_path / "third", None)


def test_a_router_makes_another_certificate_from_the_present_file(tmp_path: Path) -> None:
    path, router = tmp_path / "secret", Identity()
    path.write_bytes(OLD)
    issue = issuer(ClusterSecrets(path), "router-7")
    for secret in (OLD, NEW):
        path.write_bytes(secret)
        router.install(issue(router.request))
        assert router.certificate.authorities == identities.authority((secret,)).fingerprints
    path.unlink()
    with pytest.raises(SpecError, match="No such file"):
        issue(router.request)


def test_a_controller_follows_the_secret_file_unless_it_is_damaged(
    tmp_path: Path, identity: Identity, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "REREAD_SECONDS", 0.01)
    path = tmp_path / "secret"
    path.write_bytes(OLD)
    found = certificates.ControllerCertificates(identity, "c", ClusterSecrets(path))
    renewals: list[tuple[bytes, ...]] = []

    async def run() -> None:
        keeping = asyncio.create_task(found.keep(lambda: renewals.append(found.authority().fingerprints)))
        path.write_bytes(b"short")
        await asyncio.sleep(0.1)
        assert renewals == []
        path.write_bytes(NEW + b"\n" + OLD)
        await eventually(lambda: renewals == [ClusterAuthority((NEW, OLD)).fingerprints])
        assert identity.certificate.authorities == renewals[0]
        path.chmod(0o644)
        await asyncio.sleep(0.1)
        assert len(renewals) == 1 and not keeping.done()
        keeping.cancel()

    asyncio.run(run())


def test_builds_that_are_up_are_certified_again_until_it_succeeds(
    driver: FakeDriver, identity: Identity, eventually: Eventually
) -> None:
    async def run() -> None:
        supervisor = Supervisor(
            parse_spec({"models": [{"replicas": 2}]}), driver, Membership(), partial(watch_health, identity)
        )
        supervisor.start()
        await eventually(lambda: supervisor.reconciler.ready and len(driver.credentials) == 2)
        driver.errors["install_credentials"].append(RuntimeError("no reply"))
        supervisor.renew_certificates()
        await eventually(lambda: len(driver.credentials) == 4)
        assert sorted(driver.credentials) == sorted(2 * [ReplicaName(f"smollm2-{place}", 1) for place in range(2)])
        await supervisor.stop()

    asyncio.run(run())


def test_a_router_has_the_id_of_its_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "credentials"
    issue_credentials(identities.authority(), "router-7").write(path)
    started: list[str] = []

    def run(config: RouterConfig, issue: object) -> int:
        assert issue is None, "it does not have the secret"
        started.append(config.router_id)
        return 0

    monkeypatch.setattr("headrace_cluster.cli.router._run", run)
    assert run_router(parse_spec({}), "127.0.0.1:1", path) == 0 and started == ["router-7"]


def test_routers_renew_their_own_certificate_only(identity: Identity) -> None:
    old, both = identities.authority((OLD,)), identities.authority((NEW, OLD))
    valid = [old]

    async def run() -> None:
        controller, router = Identity(), identities.member(Component.ROUTER, old, "router-7")
        controller.install(old.certify(controller.request, Component.CONTROLLER, "c"))
        server, port = await start_control_server(Membership(), controller, lambda: valid[0], "127.0.0.1", 0)
        address = f"127.0.0.1:{port}"
        async with router.channel(address, Component.CONTROLLER, NO_PROXY) as channel:
            stub: Any = control_pb2_grpc.ControlStub(channel)
            reply = await stub.Report(control_pb2.RouterReport(router_id="router-7"))
            assert not router.is_due(reply.authorities)
            valid[0] = both
            reply = await stub.Report(control_pb2.RouterReport(router_id="router-7"))
            assert router.is_due(reply.authorities)
            made = await stub.Renew(control_pb2.RenewRequest(certificate_request=router.request))
            router.install(Certificate(made.chain, made.trust, tuple(made.authorities), made.renew_seconds))
            assert not router.is_due(reply.authorities)
            assert made.tenant_key == both.tenant_key != old.tenant_key
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.Renew(control_pb2.RenewRequest(certificate_request=b"nonsense"))
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            # The connection is older than the secrets: it has the certificate of one that is no longer valid.
            valid[0] = identities.authority((NEW,))
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.Renew(control_pb2.RenewRequest(certificate_request=router.request))
            assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
            certificate = RouterCertificate(router)
            with pytest.raises(grpc.aio.AioRpcError):
                await certificate.renew_if_due(stub, valid[0].fingerprints)
            assert "no longer valid" in certificate.refusal
            valid[0] = both
            await certificate.renew_if_due(stub, valid[0].fingerprints)
            assert not certificate.refusal
        chain = x509.load_pem_x509_certificate(router.certificate.chain.encode())
        assert chain.subject.rfc4514_string() == "CN=router-7"
        names = chain.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.DNSName) == [Component.ROUTER.dns_name]
        replica = identities.member(Component.REPLICA, old)
        async with replica.channel(address, Component.CONTROLLER, NO_PROXY) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await control_pb2_grpc.ControlStub(channel).Renew(  # type: ignore[misc]
                    control_pb2.RenewRequest(certificate_request=replica.request)
                )
            assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED
        await server.stop(0)

    asyncio.run(run())
