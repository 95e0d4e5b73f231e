"""gRPC headrace.v1.Control: routers receive the member list, and count as alive while the stream is open."""

import secrets
from collections.abc import AsyncIterator
from typing import Any

import grpc

from headrace_cluster.controller.members import Membership
from headrace_proto import control_pb2 as pb
from headrace_proto import control_pb2_grpc
from headrace_proto.address import host_port
from headrace_proto.channel_options import SERVER
from headrace_proto.errors import ListenError
from headrace_proto.secret import SecretInterceptor


class ControlService(control_pb2_grpc.ControlServicer):
    """Serves the member list, and listens to what routers hear."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.MemberList]:
        """Streams the list; the client is a registered router until the stream ends."""
        registration = secrets.token_bytes(8)
        self._membership.routers[registration] = request.router
        try:
            async for members in self._membership.watch():
                yield members
        finally:
            self._membership.routers.pop(registration, None)

    async def Report(self, request: pb.RouterReport, context: Any) -> pb.RouterReportReply:
        """A router says which replicas it hears."""
        self._membership.report(request)
        return pb.RouterReportReply()


async def start_control_server(membership: Membership, secret: bytes, host: str, port: int) -> tuple[Any, int]:
    """The running server and its port. Raises ListenError."""
    server = grpc.aio.server(interceptors=[SecretInterceptor(secret)], options=SERVER)
    control_pb2_grpc.add_ControlServicer_to_server(ControlService(membership), server)
    address = host_port(host, port)
    try:
        bound = server.add_insecure_port(address)
    except RuntimeError as error:
        raise ListenError(f"the controller cannot listen on {address}; choose another with --control-port") from error
    await server.start()
    return server, bound
