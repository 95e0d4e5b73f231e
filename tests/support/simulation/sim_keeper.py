"""The process that starts a controller, watches it with production's monitor, and has routers as children."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace_cluster.core.view import UNWATCHED_SECONDS, View
from headrace_cluster.errors import ControllerLostError, ControllerTakenError
from headrace_cluster.launch.controller_monitor import ControllerMonitor
from headrace_cluster.launch.controller_watch import WATCH_SECONDS
from headrace_cluster.ray.controller_handle import OPEN_SECONDS, POLL_SECONDS, VIEW_SECONDS
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_proto.errors import HeadraceError
from support.simulation.sim_ray import SimRayError

if TYPE_CHECKING:
    from support.simulation.managed_cluster import ManagedCluster

AGAIN_SECONDS = 2.0  # after a start that failed, until the service manager starts it again
KEEPER = "keeper"


class _ProcessEndedError(BaseException):
    """This keeper was killed while it waited in a call."""


class SimKeeper:
    """Its calls block, as in production: the world's other events go on meanwhile."""

    def __init__(self, cluster: "ManagedCluster", number: int, spec: ClusterSpec, routers: int) -> None:
        self.alive = True
        self.frozen_until = 0.0
        self.spec = spec
        self._cluster = cluster
        self._world = cluster.world
        self._id = str(number).encode()
        self._routers = routers
        self._monitor = ControllerMonitor(self, self._report, self._world.clock, self._world.random.random)
        self._world.at(0.0, self._start, self)

    def kill(self) -> None:
        """At once; its routers end with it."""
        self.alive = False
        self._cluster.end_routers()

    def poll(self) -> View:
        """See MonitoredController."""
        controller = self._cluster.controller
        assert controller is not None
        self._wait(lambda: not (controller.alive and controller.frozen), VIEW_SECONDS)
        if not controller.alive or controller.frozen:
            raise ControllerLostError("the controller does not answer")
        self._cluster.polled_at = self._world.now
        return controller.view()

    def restart(self) -> None:
        """See MonitoredController."""
        if self._call_gcs(lambda: self._cluster.ray.values.get(KEEPER)) != self._id:
            raise ControllerTakenError("another process has taken over the cluster")
        self._create()

    def _start(self) -> None:
        """Takes over the cluster as soon as its controller has no keeper."""
        controller = self._cluster.controller
        watched = self._world.now - self._cluster.polled_at < UNWATCHED_SECONDS
        if controller is not None and controller.alive and not controller.frozen and watched:
            self._world.at(POLL_SECONDS, self._start, self)
            return
        try:
            self._call_gcs(lambda: self._cluster.ray.values.update({KEEPER: self._id}))
            self._create()
        except _ProcessEndedError:
            return
        except HeadraceError as error:
            self._report(str(error))
            self._world.at(AGAIN_SECONDS, self._start, self)
            return
        self._cluster.start_routers(self._routers)
        self._poll()

    def _poll(self) -> None:
        try:
            self._monitor.poll()
        except ControllerTakenError:
            self.kill()
            return
        except _ProcessEndedError:
            return
        self._world.at(WATCH_SECONDS, self._poll, self)

    def _create(self) -> None:
        """Ends the last controller and starts one. Raises HeadraceError."""
        last = self._cluster.controller
        if last is not None and last.alive:
            self._call_gcs(last.kill)
        controller = self._cluster.add_controller(self.spec)
        controller.open()
        try:
            self._wait(lambda: controller.opened or not controller.alive, OPEN_SECONDS)
        except SimRayError as error:  # of its `open`
            raise ControllerLostError("the controller did not open") from error
        if not controller.alive or not controller.opened:
            raise ControllerLostError("the controller did not open")
        self._cluster.polled_at = self._world.now

    def _call_gcs(self, work: Callable[[], object]) -> object:
        self._wait(lambda: self._world.now >= self._cluster.ray.silent_until, OPEN_SECONDS)
        if self._world.now < self._cluster.ray.silent_until or self._cluster.ray.failing:
            raise ControllerLostError("Ray does not answer")
        return work()

    def _wait(self, done: Callable[[], bool], seconds: float) -> None:
        """Blocks this process alone."""
        world = self._world
        if not done():
            world.run(world.now + seconds, lambda: done() or not self.alive)
        while self.alive and self.frozen_until > world.now:
            world.run(self.frozen_until, lambda: not self.alive)
        if not self.alive:
            raise _ProcessEndedError

    def _report(self, sentence: str) -> None:
        if self._world.tracing:
            self._world.log(f"keeper {self._id.decode()}: {sentence}")
