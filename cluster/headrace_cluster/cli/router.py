"""`headrace router`: alone, or as the child of `headrace serve`."""

import sys
from collections.abc import Callable

from headrace_cluster.processes import die_with_parent
from headrace_cluster.router_process import EXIT_CONFIG, decode_config, router_config
from headrace_cluster.secret_file import read_or_draw
from headrace_cluster.spec import ClusterSpec
from headrace_router.auth import check_exposure
from headrace_router.config import RouterConfig


def run_router(spec: ClusterSpec, controller: str) -> int:
    """Runs until SIGTERM. Raises HeadraceError."""
    from headrace_cluster.errors import SpecError

    if spec.control.secret_file is None:
        raise SpecError(
            "a router needs the cluster's secret: --secret-file FILE (`headrace controller` says where its own lies)"
        )
    host, colon, port = controller.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise SpecError(f"--controller must be HOST:PORT, not '{controller}'")
    check_exposure(spec.routers.host, spec.auth)
    return _run()(router_config(spec, controller, read_or_draw(spec.control.secret_file)))


def run_from_stdin(parent: int) -> int:
    """The config comes through a pipe; the process ends when its parent does."""
    if parent:
        die_with_parent(parent)
    try:
        config = decode_config(sys.stdin.read())
    except (ValueError, KeyError):
        print("headrace: --config-stdin is for `headrace serve`; use --controller and --secret-file", file=sys.stderr)
        return EXIT_CONFIG
    return _run()(config)


def _run() -> Callable[[RouterConfig], int]:
    from headrace_router.main import run

    return run
