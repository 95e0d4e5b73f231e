"""What the doors of a router share."""

from dataclasses import dataclass

from headrace_router.admission import Admission
from headrace_router.auth import Authenticator
from headrace_router.config import RouterConfig
from headrace_router.fleet import Fleet
from headrace_router.generation import Generation
from headrace_router.prepare import Preparer
from headrace_router.request import GenerationRequest
from headrace_router.router_metrics import RouterMetrics
from headrace_router.tokenizer_pool import TokenizerPool


@dataclass(frozen=True, slots=True)
class Services:
    """One of each per router; made by `RouterServer`."""

    config: RouterConfig
    auth: Authenticator
    fleet: Fleet
    metrics: RouterMetrics
    admission: Admission
    pool: TokenizerPool
    preparer: Preparer

    @property
    def ready(self) -> bool:
        """Whether new requests are taken and can be answered."""
        return not self.admission.closed and self.fleet.ready

    def generation(self, request: GenerationRequest) -> Generation:
        return Generation(request, self.fleet, self.metrics, self.config)
