"""GET /metrics."""

from fastapi import FastAPI, Response

from headrace_router.api.services import Services

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def add(app: FastAPI, services: Services) -> None:
    @app.get("/metrics", tags=["server"], summary="Prometheus metrics")
    async def metrics() -> Response:
        return Response(await services.metrics.text(), media_type=METRICS_TYPE)
