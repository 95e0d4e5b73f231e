"""The HTTP endpoints: one file each, and its line here. `add` adds its routes to an application."""

from collections.abc import Callable

from fastapi import FastAPI

from headrace_router.api.http.endpoints import (
    chat_completions,
    completions,
    documentation,
    health,
    metrics,
    models,
    version,
)
from headrace_router.api.services import Services

ENDPOINTS: tuple[Callable[[FastAPI, Services], None], ...] = (
    chat_completions.add,
    completions.add,
    health.add,
    metrics.add,
    models.add,
    version.add,
    documentation.add,
)
# About one particular router, not about any router on a shared port: served on its own address, too.
MONITORING = (health.add, metrics.add)
