"""GET /health and its parts."""

from fastapi import FastAPI, Response

from headrace_router.api.http.formats import json_response
from headrace_router.api.http.middleware import error_response
from headrace_router.api.services import Services
from headrace_router.core.errors import NoReplicaError

_STOPPING = "The server is shutting down."


def add(app: FastAPI, services: Services) -> None:
    @app.head("/health/live", include_in_schema=False)
    @app.get("/health/live", tags=["health"], summary="Whether the process is alive")
    async def live() -> Response:
        return json_response({"status": "live"})

    @app.head("/health/accepting", include_in_schema=False)
    @app.get("/health/accepting", tags=["health"], summary="Whether requests get an answer, if only 503")
    async def accepting() -> Response:
        """Also while no replica is ready: clients of a load balancer then get 503 with Retry-After."""
        if not services.accepting:
            closing = services.admission.ending
            sentence = _STOPPING if closing else "The controller has sent no list of replicas yet."
            return error_response(NoReplicaError(sentence))
        return json_response({"status": "accepting"})

    @app.head("/health/ready", include_in_schema=False)
    @app.head("/health", include_in_schema=False)
    @app.get("/health/ready", tags=["health"], summary="Whether requests are served")
    @app.get("/health", tags=["health"], summary="Whether requests are served")
    async def ready(model: str | None = None) -> Response:
        """With `model`: whether requests for this model are served; a model without replicas is not ready alone."""
        if not services.ready or (model is not None and not services.fleet.model_ready(model)):
            closing = services.admission.ending
            missing = "No model has a ready replica yet." if model is None else "The model has no ready replica."
            sentence = _STOPPING if closing else missing
            return error_response(NoReplicaError(sentence))  # not raised: a probe is not counted as a failed request
        return json_response({"status": "ready"})
