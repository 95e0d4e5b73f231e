"""gRPC headrace.v1.Control: routers receive the member list, and count as alive while the stream is open."""

from collections.abc import AsyncIterator
from typing import Any

from headrace_base.address import host_port
from headrace_base.cluster_member import SERVER, ClusterMember
from headrace_base.errors import ListenError
from headrace_cluster.controller.members import Membership
from headrace_proto import control_pb2 as pb
from headrace_proto import control_pb2_grpc


class ControlService(control_pb2_grpc.ControlServicer):
    """Serves the member list, and receives the reports of routers."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.MemberList]:
        """Streams the list; the client is a registered router until the stream ends."""
        router, routers = request.router, self._membership.routers
        routers[router.id] = router
        try:
            async for members in self._membership.watch():
                yield members
        finally:
            if routers.get(router.id) is router:  # else it has connected again
                del routers[router.id]

    async def Report(self, request: pb.RouterReport, context: Any) -> pb.RouterReportReply:
        """A router reports from which replicas it receives messages."""
        self._membership.report(request)
        return pb.RouterReportReply(explain=self._membership.explaining.requested(request.router_id))


async def start_control_server(
    membership: Membership, member: ClusterMember, host: str, port: int, *, reserved: bool = False
) -> tuple[Any, int]:
    """The running server and its port. reserved: by the process that started this one. Raises ListenError."""
    options = dict(SERVER) | {"grpc.so_reuseport": int(reserved)}
    server = member.server(tuple(options.items()))
    control_pb2_grpc.add_ControlServicer_to_server(ControlService(membership), server)
    address = host_port(host, port)
    try:
        bound = member.listen(server, address)
    except RuntimeError as error:
        raise ListenError(
            f"the controller cannot listen on {address}; choose another with --control-port; "
            "beside another cluster in the same Ray it also needs a name of its own: --cluster NAME"
        ) from error
    await server.start()
    return server, bound
