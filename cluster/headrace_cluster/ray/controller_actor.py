"""The controller as a named, detached Ray actor on the head node."""

import os
import time
from pathlib import Path

import msgspec

from headrace_cluster import program
from headrace_cluster.controller.certificates import ControllerCertificates
from headrace_cluster.core.view import UNWATCHED_SECONDS, ControllerArgs, Opened
from headrace_cluster.local.run_logs import log_path
from headrace_cluster.ray.controller import Controller
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_proto.errors import HeadraceError
from headrace_proto.identity import Identity
from headrace_proto.logs import LogConfig, configure_logs


class ControllerActor:
    """Ray keeps the arguments of its constructor: the controller exists from `open` on, which brings the secrets.

    An async actor: one event loop.
    """

    def __init__(self, args: bytes) -> None:
        """args: ControllerArgs."""
        self._args = msgspec.msgpack.decode(args, type=ControllerArgs)
        os.environ[program.VARIABLE] = self._args.program
        self._spec = ClusterSpec.model_validate_json(self._args.spec)
        if self._args.log_folder:
            path = log_path(Path(self._args.log_folder), "controller")
            configure_logs(LogConfig("controller", path=str(path), format=self._spec.logs.format))
        self._identity = Identity()
        self._controller: Controller | None = None
        self._opening = False
        self._polled_at = time.monotonic()

    async def request(self) -> bytes:
        """The certificate request of this process: secrets are sealed for it."""
        return self._identity.request

    async def open(self, sealed: bytes) -> bytes:
        """Opens the controller; returns an encoded Opened. sealed: ControllerSecrets."""
        self._opening = True
        try:
            certificates = ControllerCertificates(self._identity, self._spec.cluster, sealed)
            controller = Controller(self._args, self._spec, self._identity, certificates, self._is_watched)
            self._controller = controller
            return msgspec.msgpack.encode(await controller.open())
        except HeadraceError as error:
            return msgspec.msgpack.encode(Opened(error=str(error)))
        finally:
            self._opening, self._polled_at = False, time.monotonic()

    async def use_secrets(self, sealed: bytes) -> None:
        """The cluster's secrets have changed. sealed: ControllerSecrets."""
        self._opened.use_secrets(sealed)

    async def is_watched(self) -> bool:
        """Whether a keeper has polled it lately, or waits until it is open."""
        return self._is_watched()

    async def view(self) -> bytes:
        """An encoded View."""
        self._polled_at = time.monotonic()
        return msgspec.msgpack.encode(self._opened.view())

    async def close(self) -> None:
        """Drains and ends every replica, then the servers."""
        if self._controller is not None:
            await self._controller.close()

    @property
    def _opened(self) -> Controller:
        if self._controller is None:
            raise HeadraceError("this controller is not open: call `open` first")
        return self._controller

    def _is_watched(self) -> bool:
        return self._opening or time.monotonic() - self._polled_at < UNWATCHED_SECONDS
