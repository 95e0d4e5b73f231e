"""A controller's gRPC server that knows no replica."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from headrace_base.cluster_member import ClusterMember
from headrace_proto.control_pb2 import MemberList, RouterReport, RouterReportReply
from headrace_proto.control_pb2_grpc import ControlServicer, add_ControlServicer_to_server
from support.members import MEMBER


class ControlServer(ControlServicer):
    """Serves while entered; `address` is where."""

    def __init__(self, member: ClusterMember = MEMBER) -> None:
        self._server = member.server(())
        add_ControlServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{member.listen(self._server, '127.0.0.1:0')}"

    async def __aenter__(self) -> "ControlServer":
        await self._server.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._server.stop(0)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[MemberList]:
        """Sends an empty list, and nothing more."""
        yield MemberList()
        await asyncio.sleep(60)

    async def Report(self, request: RouterReport, context: Any) -> RouterReportReply:
        """It needs no accounts."""
        return RouterReportReply()
