"""Which addresses of a server need a key: one table for the banner."""

from dataclasses import dataclass
from typing import Self

from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_router.access.auth import is_loopback


@dataclass(frozen=True, slots=True)
class KeyRules:
    """Per address, the key that a client must send; empty if no key is configured."""

    api: str = ""
    docs: str = ""
    health: str = ""
    metrics: str = ""

    @classmethod
    def of(cls, spec: ClusterSpec) -> Self:
        """As the routers of this spec decide it (headrace_router/api/http/middleware.py)."""
        auth, no_auth = spec.auth, spec.routers.metrics_no_auth
        api = "needs an API key" if auth.has_keys else ""
        metrics = "needs a metrics key" if auth.has_metrics_keys else api
        if no_auth:
            metrics = "no key" if is_loopback(spec.metrics_host) else "no key: open to all who can reach it"
        return cls(
            api=api,
            docs="has a field for an API key" if api else "",
            health="no key" if api else "",
            metrics=metrics,
        )
