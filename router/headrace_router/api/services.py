"""The services that the HTTP and the gRPC API of a router share."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from headrace_router.access.auth import Authenticator
from headrace_router.api.body_budget import BodyBudget
from headrace_router.api.http.body import BodyReader
from headrace_router.api.work_slices import WorkSlices
from headrace_router.config import RouterConfig
from headrace_router.core.fleet import Fleet
from headrace_router.core.fleet_placement import FleetPlacement
from headrace_router.dispatch.admission import Admission
from headrace_router.dispatch.prepare import Preparer
from headrace_router.dispatch.request import GenerationRequest
from headrace_router.dispatch.router_metrics import RouterMetrics
from headrace_router.dispatch.running_request import RunningRequest
from headrace_router.text.model_card import ModelCard
from headrace_router.text.tokenizer_pool import TokenizerPool


@dataclass(frozen=True, slots=True)
class Services:
    """One of each per router; made by `RouterServer`."""

    config: RouterConfig
    auth: Authenticator
    fleet: Fleet[ModelCard]
    placement: FleetPlacement[ModelCard]
    metrics: RouterMetrics
    admission: Admission
    pool: TokenizerPool
    preparer: Preparer
    bodies: BodyReader
    body_budget: BodyBudget
    slices: WorkSlices

    @property
    def ready(self) -> bool:
        """Whether new requests are accepted and can be answered."""
        return not self.admission.closed and self.fleet.ready

    @asynccontextmanager
    async def run_request(self, request: GenerationRequest) -> AsyncIterator[RunningRequest]:
        """Runs a request that was admitted; a shutdown ends it. Raises ShuttingDownError."""
        async with RunningRequest(request, self.placement, self.metrics, self.config) as running:
            with self.admission.failed_on_shutdown(running.fail):
                yield running
