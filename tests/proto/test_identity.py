"""Mutual TLS between components: which peers are accepted, as what, and what others receive."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from headrace_cluster.local.authority import (
    LIFETIME_SECONDS,
    RENEW_SECONDS,
    ClusterAuthority,
)
from headrace_proto import control_pb2, replica_pb2, replica_pb2_grpc
from headrace_proto.callers import CALLERS, CallerInterceptor
from headrace_proto.channel_options import NO_PROXY, OWN_CONNECTION
from headrace_proto.component import Component
from headrace_proto.identity import Identity, SealedMessageError, seal
from support.identities import SECRET, authority, member

OTHER = b"the secret of another cluster in tests"
REFUSED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class _Replica(replica_pb2_grpc.ReplicaServicer):
    """Counts the calls that reach a method."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def WatchHealth(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.calls.append("WatchHealth")
        yield replica_pb2.ReplicaHealth()

    async def Describe(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.calls.append("Describe")
        yield replica_pb2.DescribeChunk()

    async def Transfer(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        self.calls.append("Transfer")
        yield replica_pb2.SourceFrame()


class _Served:
    """A server of a replica's identity, for one event loop."""

    def __init__(self, identity: Identity) -> None:
        self.servicer = _Replica()
        self._server = grpc.aio.server(interceptors=[CallerInterceptor()])
        replica_pb2_grpc.add_ReplicaServicer_to_server(self.servicer, self._server)
        self.address = f"127.0.0.1:{self._server.add_secure_port('127.0.0.1:0', identity.server_credentials())}"

    async def __aenter__(self) -> "_Served":
        await self._server.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._server.stop(0)


async def _call(caller: Identity, address: str, method: str, peer: Component = Component.REPLICA) -> grpc.StatusCode:
    """The status of one call of headrace.v1.Replica."""
    requests = {"WatchHealth": replica_pb2.HealthRequest(), "Describe": replica_pb2.DescribeRequest()}
    async with caller.channel(address, peer, (*NO_PROXY, *OWN_CONNECTION)) as channel:
        stub: Any = replica_pb2_grpc.ReplicaStub(channel)
        try:
            if method == "Transfer":
                frames = stub.Transfer(iter(()), timeout=3)
            else:
                frames = getattr(stub, method)(requests[method], timeout=3)
            async for _ in frames:
                pass
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("method", ["WatchHealth", "Describe", "Transfer"])
@pytest.mark.parametrize("component", list(Component))
def test_a_method_runs_for_its_plane_only(component: Component, method: str) -> None:
    async def run() -> None:
        async with _Served(member(Component.REPLICA)) as served:
            status = await _call(member(component), served.address, method)
            if CALLERS[f"/headrace.v1.Replica/{method}"] is component:
                assert (status, served.servicer.calls) == (grpc.StatusCode.OK, [method])
            else:
                assert (status, served.servicer.calls) == (grpc.StatusCode.PERMISSION_DENIED, [])

    asyncio.run(run())


def test_every_internal_method_names_its_callers() -> None:
    declared = {
        f"/{service.full_name}/{method.name}"
        for file, name in ((replica_pb2, "Replica"), (control_pb2, "Control"))
        for service in [file.DESCRIPTOR.services_by_name[name]]
        for method in service.methods
    }
    assert declared == CALLERS.keys()


def _expired(component: Component) -> Identity:
    past = ClusterAuthority((SECRET,), clock=lambda: 1.8e9 - 9e7 - LIFETIME_SECONDS)
    return member(component, past)


def _unsigned(component: Component) -> Identity:
    """Has a certificate that it made itself, and trusts the cluster."""
    foreign = member(component, authority((OTHER,)))
    certificate = authority().certify(foreign.request, component, "never installed")
    foreign.install(type(certificate)(foreign.certificate.chain, certificate.trust, (), 0.0))
    return foreign


@pytest.mark.parametrize("make", [_expired, _unsigned], ids=["expired", "foreign"])
def test_a_server_refuses_a_caller_whose_certificate_is_not_valid(make: Any) -> None:
    async def run() -> None:
        async with _Served(member(Component.REPLICA)) as served:
            assert await _call(make(Component.ROUTER), served.address, "Describe") in REFUSED
            assert served.servicer.calls == []

    asyncio.run(run())


@pytest.mark.parametrize("make", [_expired, _unsigned], ids=["expired", "foreign"])
def test_a_caller_refuses_a_server_whose_certificate_is_not_valid(make: Any) -> None:
    async def run() -> None:
        async with _Served(make(Component.REPLICA)) as served:
            assert await _call(member(Component.ROUTER), served.address, "Describe") in REFUSED
            assert served.servicer.calls == []

    asyncio.run(run())


@pytest.mark.parametrize("component", [Component.ROUTER, Component.CONTROLLER])
def test_a_member_of_another_plane_cannot_pose_as_a_replica(component: Component) -> None:
    async def run() -> None:
        async with _Served(member(component)) as served:
            assert await _call(member(Component.ROUTER), served.address, "Describe") in REFUSED
            assert served.servicer.calls == []

    asyncio.run(run())


@pytest.fixture
def listener() -> Iterator[tuple[str, bytearray]]:
    """Listens on an address that a list may still name, and records all that it receives."""
    received = bytearray()
    listener = socket.create_server(("127.0.0.1", 0))

    def record() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(0.3)
                try:
                    while data := connection.recv(4096):
                        received.extend(data)
                except OSError:
                    pass

    thread = threading.Thread(target=record, daemon=True)
    thread.start()
    yield f"127.0.0.1:{listener.getsockname()[1]}", received
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(30)


def test_an_unauthenticated_peer_at_a_listed_address_receives_a_handshake_only(
    listener: tuple[str, bytearray],
) -> None:
    address, received = listener
    caller = member(Component.ROUTER, name="a-name-in-the-certificate")
    assert asyncio.run(_call(caller, address, "Describe")) in REFUSED
    assert received[:1] == b"\x16", "a TLS handshake, not the text of HTTP/2"
    for hidden in (SECRET, SECRET.hex().encode(), b"a-name-in-the-certificate", b"Describe"):
        assert hidden not in received


def test_rotation_needs_no_restart_and_no_new_connection() -> None:
    async def run() -> None:
        old, both, new = authority(), authority((OTHER, SECRET)), authority((OTHER,))
        replica, router = Identity(), Identity()
        replica.install(old.certify(replica.request, Component.REPLICA, "r"))
        router.install(old.certify(router.request, Component.ROUTER, "r"))
        async with _Served(replica) as served:
            assert router.is_due(both.fingerprints)
            replica.install(both.certify(replica.request, Component.REPLICA, "r"))
            router.install(both.certify(router.request, Component.ROUTER, "r"))
            assert await _call(router, served.address, "Describe") is grpc.StatusCode.OK
            # An instance that has not been renewed yet is still accepted, as long as both are valid.
            assert served.servicer.calls == ["Describe"]
            replica.install(new.certify(replica.request, Component.REPLICA, "r"))
            router.install(new.certify(router.request, Component.ROUTER, "r"))
            assert await _call(router, served.address, "Describe") is grpc.StatusCode.OK
            assert await _call(member(Component.ROUTER, old), served.address, "Describe") in REFUSED
            assert not router.is_due(new.fingerprints)

    asyncio.run(run())


def test_a_process_that_was_cut_off_during_a_rotation_still_verifies_the_others() -> None:
    """It trusts the old authority only; otherwise it could not reach the controller to renew."""
    old, both, new = authority(), authority((OTHER, SECRET)), authority((OTHER,))

    async def run() -> None:
        router = member(Component.ROUTER, old)
        async with _Served(member(Component.REPLICA, both)) as served:
            assert await _call(router, served.address, "Describe") is grpc.StatusCode.OK
            assert await _call(member(Component.ROUTER, new), served.address, "Describe") is grpc.StatusCode.OK
        async with _Served(member(Component.REPLICA, new)) as served:
            assert await _call(router, served.address, "Describe") in REFUSED

    asyncio.run(run())


def test_a_certificate_is_due_after_a_third_of_its_life() -> None:
    now, issued = 1000.0, authority()
    router = Identity(clock=lambda: now)
    router.install(issued.certify(router.request, Component.ROUTER, "r"))
    now += RENEW_SECONDS - 1
    assert not router.is_due(issued.fingerprints)
    now += 2
    assert router.is_due(issued.fingerprints)
    certificate = x509.load_pem_x509_certificate(router.certificate.chain.encode())
    assert abs(certificate.not_valid_after_utc.timestamp() - time.time() - LIFETIME_SECONDS) < 600


def test_an_expired_certificate_is_due_whatever_the_clock_of_renewals_says() -> None:
    past = ClusterAuthority((SECRET,), lambda: time.time() - LIFETIME_SECONDS - 1)
    router = Identity(clock=lambda: 1.0)
    router.install(past.certify(router.request, Component.ROUTER, "r"))
    assert router.is_due(past.fingerprints)


def test_a_saved_identity_is_the_same_member() -> None:
    identity = member(Component.ROUTER)
    again = Identity.restore(identity.save())
    assert again.certificate == identity.certificate
    assert x509.load_pem_x509_csr(again.request).public_key() == x509.load_pem_x509_csr(identity.request).public_key()


def test_a_sealed_message_is_read_by_its_receiver_only() -> None:
    receiver, other = Identity(), Identity(ec.generate_private_key(ec.SECP256R1()))
    sealed = seal(receiver.request, b"the admin key")
    assert receiver.unseal(sealed) == b"the admin key" and b"admin" not in sealed
    for changed in (sealed[:-1] + bytes([sealed[-1] ^ 1]), sealed[:40], b""):
        with pytest.raises(SealedMessageError):
            receiver.unseal(changed)
    with pytest.raises(SealedMessageError, match="start this one again"):
        other.unseal(sealed)
