"""A router whose certificate its cluster no longer accepts: it gets another one, or ends."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import SecretBytes

from headrace_cluster.local.authority import LIFETIME_SECONDS, ClusterAuthority
from headrace_cluster.local.router_credentials import issue_credentials
from headrace_proto.component import Component
from headrace_proto.control_pb2 import RouterInfo
from headrace_router.config import RouterConfig, StaticMember
from headrace_router.core.account import AccountTable
from headrace_router.core.fleet import Fleet
from headrace_router.replicas import router_certificate
from headrace_router.replicas.membership import watch_controller
from headrace_router.replicas.router_certificate import CertificateRefusedError, RouterCertificate
from headrace_router.server import RouterServer
from support import identities
from support.router.control_server import ControlServer

NEW = b"the next secret of every cluster in tests"


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_PAUSE", "LAST_PAUSE", "REFUSED_SECONDS"):
        monkeypatch.setattr(router_certificate, name, 0.05)


async def _until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(8):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def _watched(certificate: RouterCertificate, has_replica: Callable[[], bool], end: Callable[[], object]) -> None:
    """A watch of a controller that has the new secret only, until the condition holds."""
    fleet: Fleet[Any] = Fleet(lambda member: None, 0, clock=time.monotonic, jitter=lambda: 0.0)  # type: ignore[arg-type,return-value]
    async with ControlServer(identities.authority((NEW,))) as controller:
        tasks = [
            asyncio.create_task(
                watch_controller(controller.address, RouterInfo(id="r"), certificate, fleet, AccountTable(), list)
            ),
            asyncio.create_task(certificate.run_until_refused(has_replica)),
        ]
        try:
            await _until(lambda: end() or tasks[1].done())
            if tasks[1].done():
                tasks[1].result()
        finally:
            for task in tasks:
                task.cancel()


def test_a_router_that_missed_a_rotation_ends_with_what_to_do() -> None:
    certificate = RouterCertificate(identities.member(Component.ROUTER))
    with pytest.raises(CertificateRefusedError, match=r"of another secret; .* `headrace credentials`"):
        asyncio.run(_watched(certificate, lambda: False, lambda: False))


def test_a_router_with_the_secret_file_makes_itself_another_certificate() -> None:
    new = identities.authority((NEW,))
    renewals: list[bool] = []
    identity = identities.member(Component.ROUTER)
    certificate = RouterCertificate(
        identity, lambda request: new.certify(request, Component.ROUTER, "r"), lambda key: renewals.append(True)
    )
    asyncio.run(_watched(certificate, lambda: True, lambda: renewals and not certificate.refusal))
    assert identity.certificate.authorities == new.fingerprints


def test_a_router_continues_while_it_is_connected_to_a_replica() -> None:
    async def run() -> None:
        replicas = [True]
        certificate = RouterCertificate(identities.member(Component.ROUTER))
        certificate.refused("a reason")
        kept = asyncio.create_task(certificate.run_until_refused(lambda: bool(replicas)))
        await asyncio.sleep(0.3)
        assert not kept.done()
        replicas.clear()
        with pytest.raises(CertificateRefusedError, match="a reason"):
            await asyncio.wait_for(kept, 5)

    asyncio.run(run())


def test_a_refusal_that_passes_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_certificate, "REFUSED_SECONDS", 30.0)

    async def run() -> None:
        now = 0.0
        certificate = RouterCertificate(identities.member(Component.ROUTER), clock=lambda: now)
        kept = asyncio.create_task(certificate.run_until_refused(lambda: False))
        for _ in range(3):
            certificate.refused("the controller restarts")
            await asyncio.sleep(0.2)
            now += 29
            certificate.accepted()
            await asyncio.sleep(0.2)
        assert not kept.done()
        kept.cancel()

    asyncio.run(run())


def test_streams_of_a_router_finish_before_it_ends_for_its_certificate(make_replica: Any) -> None:
    """The certificate expires while the router serves: the connection to its replica continues, and is the last one."""

    async def run() -> None:
        replica = make_replica()
        await replica.start()
        soon = ClusterAuthority((identities.SECRET,), clock=lambda: time.time() - LIFETIME_SECONDS + 2)
        members = (StaticMember(address=replica.address, replica_id="r0"),)
        credentials = SecretBytes(issue_credentials(soon, "r").encode())
        config = RouterConfig(port=0, grpc_port=None, members=members, credentials=credentials, shutdown_seconds=0)
        router = RouterServer(config)
        await router.start()
        serving = asyncio.create_task(router.serve_until(asyncio.Event()))
        await _until(lambda: router.services.ready)
        await _until(lambda: router._certificate.refusal)
        await asyncio.sleep(0.3)
        assert router.services.ready and not serving.done()
        await replica.kill()
        with pytest.raises(CertificateRefusedError, match="has expired"):
            await asyncio.wait_for(serving, 10)

    asyncio.run(run())
