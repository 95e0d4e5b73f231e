"""JSON lines on stderr. No prompts, no keys (RELIABILITY R15)."""

import logging
import sys

import structlog


def configure_logs(level: str, router_id: str) -> None:
    """For the router's own process only: what embeds a router keeps its own configuration."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(router=router_id)
