"""GET /metrics."""

from fastapi import FastAPI, Request, Response

from headrace_router.api.services import Services


def add(app: FastAPI, services: Services) -> None:
    @app.get("/metrics", tags=["server"], summary="Prometheus metrics")
    async def metrics(request: Request) -> Response:
        given = request.headers
        page, headers = await services.metrics.page(given.get("accept", ""), given.get("accept-encoding", ""))
        return Response(page, headers=headers)
