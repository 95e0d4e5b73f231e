"""Which addresses of a server need a key or a client certificate: one table for the banner."""

from dataclasses import dataclass
from typing import Self

from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_router.access.auth import is_loopback


@dataclass(frozen=True, slots=True)
class KeyRules:
    """Per address, what a client must send; empty if it is nothing."""

    api: str = ""
    docs: str = ""
    health: str = ""
    metrics: str = ""

    @classmethod
    def of(cls, spec: ClusterSpec) -> Self:
        """As the routers of this spec decide it (headrace_router/api/http/middleware.py)."""
        auth, no_auth = spec.auth, spec.routers.metrics_no_auth
        key = "needs an API key" if auth.has_keys else ""
        certificate = "needs a client certificate" if spec.tls.client_ca is not None else ""
        metrics = "needs a metrics key" if auth.has_metrics_keys else key
        if no_auth:
            metrics = "no key" if is_loopback(spec.metrics_host) else "no key: open to all who can reach it"
        return cls(
            api=_both(certificate, key),
            docs=_both(certificate, "Authorize takes an API key" if key else ""),
            health=_both(certificate, "no key" if key else ""),
            metrics=metrics,
        )


def _both(certificate: str, key: str) -> str:
    return "; ".join(filter(None, (certificate, key)))
