"""gRPC headrace.v1.Control: routers receive the member list, and count as alive while the stream is open."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from headrace_cluster.controller.members import Membership
from headrace_cluster.local.authority import CertificateRequestError, ClusterAuthority
from headrace_proto import control_pb2 as pb
from headrace_proto import control_pb2_grpc
from headrace_proto.address import host_port, split_address
from headrace_proto.callers import CallerInterceptor, caller_certificate, caller_name
from headrace_proto.channel_options import SERVER, Options
from headrace_proto.component import Component
from headrace_proto.errors import ListenError
from headrace_proto.identity import Identity

# A report has about a hundred bytes for each replica; parsing and keeping it is work of the controller's event loop.
MESSAGES: Options = (("grpc.max_receive_message_length", 256 << 10),)
FIELD_CHARS = 256  # of what a router registers


class ControlService(control_pb2_grpc.ControlServicer):
    """Serves the member list, receives the reports of routers, and renews their certificates."""

    def __init__(self, membership: Membership, authority: Callable[[], ClusterAuthority]) -> None:
        """authority: the current one."""
        self._membership = membership
        self._authority = authority

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.MemberList]:
        """Streams the list; the client is a registered router until the stream ends."""
        router = request.router
        await _check_name(router.id, context)
        addresses = [address for address in (router.http, router.grpc, router.metrics) if address]
        if max(map(len, (router.node, *addresses))) > FIELD_CHARS:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"an address has {FIELD_CHARS} characters at most")
        try:
            for address in addresses:  # `headrace status` prints them
                split_address(address)
        except ValueError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "an address of a router must be HOST:PORT")
        routers = self._membership.routers
        routers[router.id] = router
        try:
            async for members in self._membership.watch():
                yield members
        finally:
            if routers.get(router.id) is router:  # else it has connected again
                del routers[router.id]

    async def Report(self, request: pb.RouterReport, context: Any) -> pb.RouterReportReply:
        """A router reports from which replicas it receives messages."""
        await _check_name(request.router_id, context)
        self._membership.report(request)
        return pb.RouterReportReply(
            authorities=self._authority().fingerprints,
            explain=self._membership.explaining.requested(request.router_id),
        )

    async def Renew(self, request: pb.RenewRequest, context: Any) -> pb.RenewReply:
        """Another certificate for the caller, of its own component and name.

        A connection may be older than the secrets: the caller's certificate must be valid now.
        """
        if not self._authority().is_member(caller_certificate(context)):
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "the certificate has expired, or its secret is no longer valid"
            )
        authority = self._authority()
        try:
            made = authority.certify(request.certificate_request, Component.ROUTER, caller_name(context))
        except CertificateRequestError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return pb.RenewReply(
            chain=made.chain,
            trust=made.trust,
            authorities=made.authorities,
            renew_seconds=made.renew_seconds,
            tenant_key=authority.tenant_key,
        )


async def _check_name(name: str, context: Any) -> None:
    if name != caller_name(context):
        await context.abort(
            grpc.StatusCode.PERMISSION_DENIED,
            "a router may use the name in its certificate only: start it with credentials of its own",
        )


async def start_control_server(
    membership: Membership,
    identity: Identity,
    authority: Callable[[], ClusterAuthority],
    host: str,
    port: int,
    *,
    reserved: bool = False,
) -> tuple[Any, int]:
    """The running server and its port. reserved: by the process that started this one. Raises ListenError."""
    options = dict((*SERVER, *MESSAGES)) | {"grpc.so_reuseport": int(reserved)}
    server = grpc.aio.server(
        interceptors=[CallerInterceptor(membership.caller_streams)], options=tuple(options.items())
    )
    control_pb2_grpc.add_ControlServicer_to_server(ControlService(membership, authority), server)
    address = host_port(host, port)
    try:
        bound = server.add_secure_port(address, identity.server_credentials())
    except RuntimeError as error:
        raise ListenError(f"the controller cannot listen on {address}; choose another with --control-port") from error
    await server.start()
    return server, bound
