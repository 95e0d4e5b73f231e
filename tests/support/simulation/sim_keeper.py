"""The process that has controller and routers as children, and starts a lost controller again."""

from typing import TYPE_CHECKING

from headrace_cluster.core.backoff import Restarts
from headrace_cluster.launch.child_process import BACKOFF, WINDOW_SECONDS
from headrace_cluster.launch.controller_process import START_SECONDS, VIEW_SECONDS
from headrace_cluster.launch.serve import WATCH_SECONDS
from headrace_cluster.spec.cluster_spec import ClusterSpec
from support.simulation.sim_ray import SimRayError

if TYPE_CHECKING:
    from support.simulation.managed_cluster import ManagedCluster
    from support.simulation.sim_controller import SimController


class SimKeeper:
    """As `ControllerProcess` and `RouterGroup`; its children end with it."""

    def __init__(self, cluster: "ManagedCluster", spec: ClusterSpec, routers: int) -> None:
        self.alive = True
        self.frozen_until = 0.0
        self.spec = spec
        self._cluster = cluster
        self._world = cluster.world
        self._controller: SimController | None = None
        self._restarts = Restarts(BACKOFF, WINDOW_SECONDS, cluster.world.random.random)
        self._answer_by = 0.0
        self._start_controller()
        cluster.start_routers(routers)
        self._world.at(WATCH_SECONDS, self._watch, self)

    def kill(self) -> None:
        """At once."""
        self.alive = False
        self._cluster.end_routers()
        if self._controller is not None and self._controller.alive:
            self._controller.kill()

    def _start_controller(self) -> None:
        self._controller = self._cluster.add_controller(self.spec)
        self._controller.open()
        self._answer_by = self._world.now + START_SECONDS

    def _watch(self) -> None:
        controller = self._controller
        if controller is not None and self._has_ended(controller):
            if controller.alive:
                controller.kill()
            self._controller = None
            self._world.at(self._restarts.lost(self._world.now), self._start_controller, self)
        self._world.at(WATCH_SECONDS, self._watch, self)

    def _has_ended(self, controller: "SimController") -> bool:
        """Or does not answer for too long."""
        try:
            opened = controller.opened
        except SimRayError:  # of its `open`
            return True
        if controller.alive and opened and not controller.frozen:
            self._answer_by = self._world.now + VIEW_SECONDS
        return not controller.alive or self._world.now >= self._answer_by
