"""Watches the controller's member list, which registers this router, and reports from which replicas it receives."""

import asyncio
import json
import random
import time
from collections.abc import Callable
from typing import Any

import grpc
import structlog

from headrace_base.cluster_member import WATCHER, ClusterMember
from headrace_proto.control_pb2 import (
    Member,
    MemberList,
    ModelPlacement,
    RequestAccount,
    RouterInfo,
    WatchRequest,
)
from headrace_proto.control_pb2_grpc import ControlStub
from headrace_proto.replica_pb2 import REPLICA_STATE_READY, ReplicaIdentity
from headrace_router.config import StaticMember
from headrace_router.core.account import AccountTable
from headrace_router.core.fleet import Fleet
from headrace_router.text.model_card import ModelCard

FIRST_BACKOFF = 0.1
LAST_BACKOFF = 2.0
REPORT_SECONDS = 0.5  # between two reports; less than the controller's FRESH_SECONDS
REQUESTED_SECONDS = 0.02  # before one with accounts that the controller has requested
MAX_ACCOUNTS = 16  # in one report


log = structlog.get_logger("headrace.router.membership")


def static_list(members: tuple[StaticMember, ...]) -> MemberList:
    """The list of a router without controller: every member is listed as ready; its stream decides."""
    return MemberList(
        members=[
            Member(
                identity=ReplicaIdentity(replica_id=member.replica_id),
                address=member.address,
                state=REPLICA_STATE_READY,
            )
            for member in members
        ]
    )


async def watch_controller(
    address: str,
    info: RouterInfo,
    member: ClusterMember,
    fleet: Fleet[ModelCard],
    accounts: AccountTable,
    placements: Callable[[], list[ModelPlacement]],
) -> None:
    """Watches until cancelled. While the controller is unreachable the last list stays in use.

    accounts: the controller may request some for an operator. placements: how requests were placed, for its status.
    """
    backoff = FIRST_BACKOFF
    warned = listed = False
    while True:
        try:
            async with member.channel(address, WATCHER) as channel:
                stub: Any = ControlStub(channel)
                report = asyncio.create_task(_report(stub, info.id, member, fleet, accounts, placements))
                try:
                    async for members in stub.Watch(WatchRequest(router=info), metadata=member.metadata):
                        fleet.update(members)
                        if warned:
                            log.warning("the controller is reachable again", address=address)
                        backoff, warned, listed = FIRST_BACKOFF, False, True
                finally:
                    report.cancel()
            reason = "the controller ended the stream"
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details() or ''}"[:200]
        except Exception:
            # A bug of ours must not end the updates of this router's list.
            log.exception("a member list could not be applied")
            reason = "internal error"
        if not warned:
            remedy = "the last member list stays in use"
            if not listed:
                remedy = "if this stays, check --controller, and that --secret-file is that of the controller"
            log.warning(f"controller is unreachable; {remedy}", address=address, reason=reason)
            warned = True
        await asyncio.sleep(backoff * random.uniform(0.5, 1.5))
        backoff = min(2 * backoff, LAST_BACKOFF)


async def _report(
    stub: Any,
    router_id: str,
    member: ClusterMember,
    fleet: Fleet[ModelCard],
    accounts: AccountTable,
    placements: Callable[[], list[ModelPlacement]],
) -> None:
    """Reports to the controller from which replicas this router receives, until cancelled."""
    requested: list[str] = []
    while True:
        try:
            report = fleet.report(router_id)
            names, requested = requested, []
            report.accounts.extend(_account(name, accounts) for name in names)
            report.models.extend(placements())
            reply = await stub.Report(report, timeout=REPORT_SECONDS, metadata=member.metadata)
            requested = list(reply.explain)[:MAX_ACCOUNTS]
        except grpc.aio.AioRpcError:
            pass  # the controller is unreachable, which the member list's task logs
        except Exception:  # without reports this router would soon not count any more
            log.exception("a report to the controller failed")
        await asyncio.sleep(REQUESTED_SECONDS if requested else REPORT_SECONDS)


def _account(name: str, accounts: AccountTable) -> RequestAccount:
    document = ""
    try:
        account = accounts.get(name)
        if account is not None:
            document = json.dumps(account.document(time.monotonic()))
    except Exception:  # the report itself matters more
        log.exception("the account of a request failed")
    return RequestAccount(request_id=name, document=document)
