"""The controller's /health and /metrics: for probes and Prometheus, on a port of its own."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from headrace_cluster.controller.control_loop import ControlLoop
from headrace_cluster.controller.members import Membership
from headrace_cluster.controller.status import replica_state
from headrace_cluster.core.replica_build import State

LOOK_LIMIT_SECONDS = 30.0  # without a look at Ray, for the controller to be unhealthy: it can change nothing
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class ClusterCollector(Collector):
    """Reads the planner at each scrape."""

    def __init__(self, loop: ControlLoop, membership: Membership, problems: Callable[[], list[str]]) -> None:
        self._loop = loop
        self._membership = membership
        self._problems = problems

    def collect(self) -> Iterator[Metric]:
        planner = self._loop.planner
        states: Counter[tuple[str, str]] = Counter()
        wanted: Counter[str] = Counter()
        outdated: Counter[str] = Counter()
        for name, each in planner.wanted.items():
            model, build = each.model.name, planner.current(name)
            states[model, replica_state(planner, name)] += 1
            wanted[model] += not each.drained
            outdated[model] += build is not None and not each.drained and build.digest != each.digest
        models = [model.name for model in self._loop.effective.models]
        replicas = GaugeMetricFamily("headrace_replicas", "Replicas by state.", labels=("model_name", "state"))
        for model in models:
            for state in State:
                replicas.add_metric((model, state), states[model, state])
        yield replicas
        yield _by_model("headrace_replicas_wanted", "Replicas that are to run.", models, wanted)
        yield _by_model("headrace_replicas_outdated", "Replicas that are to be built again.", models, outdated)
        deaths = CounterMetricFamily(
            "headrace_replica_failures",
            "Builds that ended or did not start, without being told to.",
            labels=("model_name",),
        )
        for model in {*models, *planner.failures}:
            deaths.add_metric((model,), planner.failures[model])
        yield deaths
        leaving = sum(build.node_ends_at is not None for build in planner.builds.values())
        yield GaugeMetricFamily("headrace_replicas_on_draining_nodes", "Builds on nodes that Ray ends.", leaving)
        yield GaugeMetricFamily("headrace_routers", "Registered routers.", len(self._membership.routers))
        yield GaugeMetricFamily("headrace_problems", "Sentences of `headrace status`.", len(self._problems()))


def monitoring_app(
    loop: ControlLoop, membership: Membership, problems: Callable[[], list[str]], may_read: Callable[[bytes], bool]
) -> Starlette:
    """GET /health/live, /health (503 while Ray does not answer) and /metrics.

    may_read: whether the value of an Authorization header allows to read /metrics.
    """
    registry = CollectorRegistry()
    registry.register(ClusterCollector(loop, membership, problems))

    async def live(_request: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def health(_request: Request) -> Response:
        silent = loop.clock() - loop.planner.looked_at
        if silent > LOOK_LIMIT_SECONDS:
            return JSONResponse({"status": f"Ray has not answered for {silent:.0f} s"}, status_code=503)
        return JSONResponse({"status": "healthy"})

    async def metrics(request: Request) -> Response:
        if not may_read(request.headers.get("authorization", "").encode()):
            return PlainTextResponse("send a metrics key in the header 'Authorization: Bearer KEY'", status_code=401)
        return Response(generate_latest(registry), media_type=METRICS_TYPE)

    return Starlette(
        routes=[Route("/health/live", live), Route("/health", health), Route("/metrics", metrics)],
    )


def _by_model(name: str, text: str, models: Iterable[str], values: Counter[str]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=("model_name",))
    for model in models:
        family.add_metric((model,), values[model])
    return family
