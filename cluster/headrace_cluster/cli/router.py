"""`headrace router`: standalone, or as a child process of `headrace serve`."""

import sys

from headrace_cluster.errors import SpecError
from headrace_cluster.launch.display import show_message
from headrace_cluster.launch.router_process import EXIT_CONFIG, decode_config, router_config
from headrace_cluster.local.processes import set_parent_death_signal
from headrace_cluster.program import program_name
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_proto.address import port_of
from headrace_router.access.auth import check_exposure, check_metrics_exposure
from headrace_router.config import RouterConfig


def run_router(spec: ClusterSpec, controller: str) -> int:
    """Runs until SIGTERM. Raises HeadraceError."""
    if spec.control.secret_file is None:
        raise SpecError("a router needs the cluster's secret: --secret-file FILE, the same one as of the controller")
    if not port_of(controller):
        raise SpecError(f"--controller must be HOST:PORT, not '{controller}'")
    check_exposure(spec.routers.host, spec.auth)
    check_metrics_exposure(spec.metrics_host, spec.auth, no_auth=spec.routers.metrics_no_auth)
    own = spec.routers
    addresses = f"HTTP {own.host}:{own.port}, gRPC {own.host}:{own.grpc_port}"
    show_message(f"a router starts: {addresses}, controller {controller}")
    return _run(router_config(spec, controller, spec.control.secret_file))


def run_from_stdin(parent: int) -> int:
    """Reads the config from a pipe; the process ends when its parent does."""
    if parent:
        set_parent_death_signal(parent)
    try:
        config = decode_config(sys.stdin.read())
    except (ValueError, KeyError):
        print(
            f"headrace: --config-stdin is for `{program_name()} serve`; otherwise pass --controller and --secret-file",
            file=sys.stderr,
        )
        return EXIT_CONFIG
    return _run(config)


def _run(config: RouterConfig) -> int:
    from headrace_router.main import run

    return run(config)
