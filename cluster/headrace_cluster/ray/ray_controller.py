"""The controller in its process: reconciles through Ray, gRPC for routers, HTTP for the command line."""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from functools import partial
from socket import gethostname
from typing import Any

import structlog

from headrace_base.cluster_member import ClusterMember, SecretFile
from headrace_cluster.controller.admin import admin_app, admin_server, listen
from headrace_cluster.controller.control_loop import ControlLoop
from headrace_cluster.controller.control_service import start_control_server
from headrace_cluster.controller.members import Membership
from headrace_cluster.controller.monitoring import monitoring_app
from headrace_cluster.controller.operations import replica_operations
from headrace_cluster.controller.replica_health import watch_health
from headrace_cluster.controller.spec_file import SpecFile
from headrace_cluster.controller.status import status_document, view
from headrace_cluster.core.rank_config import NODE_HOST, REPLICA_CLASS
from headrace_cluster.core.revisions import Revisions, kept_revisions, resolved_revisions, with_commits
from headrace_cluster.core.view import ClusterView, Opened
from headrace_cluster.core.wanted import lost_to
from headrace_cluster.core.words import Lease, Words
from headrace_cluster.errors import ControllerTakenError, TakeOverError
from headrace_cluster.local import state
from headrace_cluster.ray import connection
from headrace_cluster.ray import names as ray_names
from headrace_cluster.ray.calls import RayCalls
from headrace_cluster.ray.cluster_record import ClusterRecord
from headrace_cluster.ray.driver import RayDriver
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_router.access.auth import AuthConfig, Authenticator, is_loopback
from headrace_router.access.key_files import KeyFiles
from headrace_router.access.tls_files import TlsFiles

SPEC_SECONDS = 2.0  # between two looks at the spec file
LEASE_SECONDS = 1.0  # between two renewals of the lease
RENEWALS = 5  # renewals of the lease that a controller must miss to count as one that does not act
NODE_SECONDS = 5.0  # between two looks at whether this node is part of Ray; it has left when two do not find it

log = structlog.get_logger(__name__)


def prepare(spec: ClusterSpec, found: Revisions) -> tuple[ClusterSpec, Lease, Words]:
    """What `Controller` needs to take over the cluster. It blocks.

    found: the revisions of the spec that were resolved; the commits that an earlier controller loaded precede them in
    the spec that is returned.
    """
    record = ClusterRecord(spec.cluster)
    earlier, words = record.lease(), record.words()
    words.revisions = kept_revisions(spec, found, words.revisions)
    lease = Lease(id=state.new_key(), epoch=earlier.epoch + 1 if earlier else 1)
    return with_commits(spec, words.revisions), lease, words


class LeaseLostError(Exception):
    """Another controller acts: a call of this one would be beside its decisions."""


class Controller:
    """Connects a ControlLoop with a RayDriver and the two servers. `open`, then `close` or nothing. Of one event loop.

    Its process may end at any time: replicas, routers and streams go on.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        lease: Lease,
        words: Words,
        secret_file: SecretFile,
        admin_key: str,
        *,
        log_folder: str = "",
        replica_class: str = REPLICA_CLASS,
        supervised: bool = False,
        spec_file: SpecFile | None = None,
        check: Callable[[ClusterSpec], ClusterSpec] = lambda spec: spec,
        check_room: Callable[[ClusterSpec], None] = lambda spec: None,
        take_over: bool = False,
    ) -> None:
        """log_folder: of the ranks; empty: none. supervised: a `serve` holds its ports and ends the cluster.

        take_over: whatever another controller that acts has in its spec.
        spec_file: is read again when it changes. check: of models that operators apply; returns the spec with commits.
        check_room: of any change that they make; raises a HeadraceError where it is known that there is no room.
        """
        self._spec = spec
        self._lease = lease
        self._words = words
        self._admin_key = admin_key
        self._supervised = supervised
        self._take_over = take_over
        self._renewals = 0
        self._spec_file = spec_file
        self._check, self._check_room = check, check_room
        self._secret_file = secret_file
        self._key_file = SecretFile(key_file, "the admin key file") if (key_file := spec.admin.key_file) else None
        self._metrics_keys = KeyFiles(AuthConfig(metrics_key_file=spec.control.metrics_key_file))
        self._member = ClusterMember(secret_file.secret, spec.internal.tls_files)
        self._membership = Membership()
        self._calls = calls = RayCalls()
        self._record = ClusterRecord(spec.cluster)
        self._driver = RayDriver(spec, secret_file.secret, calls, NODE_HOST, replica_class, log_folder)
        self._loop = ControlLoop(
            spec,
            words,
            self._driver,
            self._membership,
            partial(watch_health, self._member),
            lambda: secret_file.secret.fingerprints,
            lambda words: calls.run(self._record.save_words, words),
            origin=f"process {os.getpid()} on {gethostname()}" + (f", {spec_file.path}" if spec_file else ""),
        )
        self._servers = contextlib.AsyncExitStack()  # that listen
        self._tasks: list[asyncio.Task[Any]] = []
        self.stop_requested = False  # a stop of the whole cluster
        self.taken = False  # by another controller
        self.node_lost = False  # Ray goes on without this node
        self.ended = asyncio.Event()  # this process is to end

    async def open(self) -> Opened:
        """Listens, takes up what an earlier controller built, and builds what is missing. Raises HeadraceError."""
        import ray.util

        host = self._spec.control.host or str(ray.util.get_node_ip_address())
        admin = listen(self._spec.admin.host, self._spec.admin.port, reserved=self._supervised)
        admin_port, metrics_port = int(admin.getsockname()[1]), self._spec.control.metrics_port
        metrics = listen(host, metrics_port, flag="control.metrics_port") if metrics_port is not None else None
        grpc, port = await start_control_server(
            self._membership, self._member, host, self._spec.control.port or 0, reserved=self._supervised
        )
        self._servers.push_async_callback(grpc.stop, grace=0.2)
        for listening in (admin, metrics):
            if listening is not None:
                self._servers.callback(listening.close)
        try:
            adopted, outdated = await self._loop.open()
            await self._check_other()
            # Not before: one with a wrong secret adopts nothing, and must not end the one with the right secret.
            self._words.update(await self._calls.run(self._take_lease))
        except BaseException:
            await self._servers.aclose()
            raise
        self._calls.before = self._check_lease
        self._loop.start()
        self._repeat("the watch over the lease", self._watch_lease)
        self._repeat("the watch over this node", self._watch_node)
        self._repeat("the watch over the secret file", partial(self._secret_file.watch, lambda: None, log.warning))
        if self._key_file is not None:
            watch = partial(self._key_file.watch, lambda: None, log.warning)
            self._repeat("the watch over the admin key file", watch)
        if self._spec_file is not None:
            self._repeat("the watch over the spec file", partial(self._watch_spec, self._spec_file))
        operations = replica_operations(self._loop, self._membership, self._check, self._check_room)
        documents = {"/status": self._status}
        app = admin_app(self._admin_keys, documents, self.stop, operations, is_loopback(self._spec.admin.host))
        tls = TlsFiles(self._spec.tls) if self._spec.tls.enabled else None
        if tls is not None:
            self._repeat("the watch over the TLS files", tls.watch)
        self._tasks.append(asyncio.create_task(admin_server(app, tls).serve(sockets=[admin])))
        if metrics is not None:
            access = Authenticator(self._metrics_keys.current, b"")
            self._repeat("the watch over the metrics key file", partial(self._metrics_keys.watch, access.use))
            pages = monitoring_app(
                self._loop, self._membership, lambda: self._status()["problems"], access.may_read_metrics
            )
            self._tasks.append(asyncio.create_task(admin_server(pages, tls).serve(sockets=[metrics])))
        return Opened(
            control_host=host,
            control_port=port,
            admin_port=admin_port,
            adopted=adopted,
            outdated=outdated,
        )

    def stop(self) -> None:
        """The cluster is to end."""
        self.stop_requested = True
        if not self._supervised:
            self.ended.set()

    def view(self) -> ClusterView:
        """For the process that shows it."""
        return view(self._loop, self._membership, stop_requested=self.stop_requested)

    async def close(self) -> None:
        """Drains and ends every replica, then the servers, then what is left of the cluster by name."""
        await self._loop.stop()
        await self._servers.aclose()
        self._calls.before = None
        await self._calls.run(self._record.remove)
        await self._calls.run(ray_names.end_cluster, self._spec.cluster)

    def _admin_keys(self) -> list[bytes]:
        """That of commands on this machine, and those of operators elsewhere."""
        return [self._admin_key.encode(), *(self._key_file.secret.values if self._key_file is not None else ())]

    def _repeat(self, label: str, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Runs it until this process ends; the status shows its failures."""
        task = asyncio.create_task(self._loop.retries.run(label, work))
        self._tasks.append(task)
        return task

    async def _watch_spec(self, file: SpecFile) -> None:
        while True:
            await asyncio.sleep(SPEC_SECONDS)
            before = file.problem
            found = await asyncio.to_thread(file.reread)
            if file.problem and file.problem != before:
                log.warning(file.problem)
            if found is not None:
                written, checked = found
                resolved = resolved_revisions(written, checked)
                self._words.revisions = kept_revisions(checked, resolved, self._words.revisions)
                self._loop.spec = with_commits(checked, self._words.revisions)
                self._loop.rethink()
                log.warning("the spec file has changed: its models are used now")

    async def _check_other(self) -> None:
        """Raises TakeOverError if another controller acts, and replicas that its spec names would end with this one."""
        words = await self._calls.run(self._record.words)
        lost = lost_to(self._spec, words, self._driver.digest)
        if words.spec is None or not lost or self._take_over or not await self._another_acts():
            return
        raise TakeOverError(
            f"another controller of the cluster '{self._spec.cluster}' acts ({words.spec.origin}), and this one's spec "
            f"would end or replace what is in that one's: {'; '.join(lost)}. Nothing was changed: change the models "
            "there, end it first, give this cluster a name of its own (--cluster NAME), or pass --take-over"
        )

    async def _another_acts(self) -> bool:
        """Whether the lease is renewed: not by a controller that has ended, is paused, or does not reach Ray."""
        lease = await self._calls.run(self._record.lease)
        if lease is None:
            return False
        before = await self._calls.run(self._record.renewal, lease)
        for _ in range(RENEWALS):
            await asyncio.sleep(LEASE_SECONDS)
            if await self._calls.run(self._record.renewal, lease) != before:
                return True
        return False

    async def _watch_lease(self) -> None:
        while not self.taken:
            await asyncio.sleep(LEASE_SECONDS)
            try:
                await self._calls.run(self._renew_lease)
            except LeaseLostError:
                self.taken = True
                self.ended.set()

    def _take_lease(self) -> Words:
        """The record as it is then. Raises ControllerTakenError: one that was started later has the lease by now."""
        found = self._record.lease()
        if found is not None and found.epoch >= self._lease.epoch:
            raise ControllerTakenError(
                f"another controller took over the cluster '{self._spec.cluster}' while this one started; this one ends"
            )
        self._record.save_lease(self._lease)
        return self._record.words()

    def _renew_lease(self) -> None:
        found = self._record.lease()
        if found is None:  # Ray's GCS has lost its storage, and this process has all of it
            log.warning("the record in Ray's GCS was lost, and is written again")
            self._record.save_lease(self._lease)
            self._loop.forget_saved()
        elif found.id != self._lease.id:
            return  # the cluster has just ended
        self._renewals += 1
        self._record.renew(self._lease, self._renewals)

    def _check_lease(self) -> None:
        """Before every call: this process may have been paused while another one took over. Raises LeaseLostError."""
        found = self._record.lease()
        if found is not None and found.id != self._lease.id:
            raise LeaseLostError("another controller has taken over the cluster")

    async def _watch_node(self) -> None:
        missed = 0
        while missed < 2:
            await asyncio.sleep(NODE_SECONDS)
            missed = 0 if await self._calls.run(connection.node_is_alive) else missed + 1
        self.node_lost = True
        self.ended.set()

    def _status(self) -> dict[str, Any]:
        document = status_document(self._loop, self._membership)
        if self._spec_file is not None and self._spec_file.problem:
            document["problems"].append(self._spec_file.problem)
            document["spec_refused"] = self._spec_file.refused
        return document | {"controller": {"pid": os.getpid()}}
