"""A controller's gRPC server that knows no replica."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from headrace_cluster.local.authority import ClusterAuthority
from headrace_proto.callers import CallerInterceptor
from headrace_proto.component import Component
from headrace_proto.control_pb2 import MemberList, RouterReport, RouterReportReply
from headrace_proto.control_pb2_grpc import ControlServicer, add_ControlServicer_to_server
from support import identities


class ControlServer(ControlServicer):
    """Serves while entered; `address` is where."""

    def __init__(self, authority: ClusterAuthority) -> None:
        self._authority = authority
        self._server = grpc.aio.server(interceptors=[CallerInterceptor()])
        add_ControlServicer_to_server(self, self._server)
        own = identities.member(Component.CONTROLLER, authority).server_credentials()
        self.address = f"127.0.0.1:{self._server.add_secure_port('127.0.0.1:0', own)}"

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
        """The valid authorities."""
        return RouterReportReply(authorities=self._authority.fingerprints)
