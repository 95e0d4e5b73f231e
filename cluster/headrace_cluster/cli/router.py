"""`headrace router`: standalone, or as a child process of `headrace serve`."""

import sys
from collections.abc import Callable
from pathlib import Path

from pydantic import SecretBytes

from headrace_cluster.errors import SpecError
from headrace_cluster.launch.router_process import EXIT_CONFIG, admitted, decode_config, issuer, router_config
from headrace_cluster.local.processes import set_parent_death_signal
from headrace_cluster.local.secret_file import ClusterSecrets
from headrace_cluster.program import program_name
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_proto.address import port_of
from headrace_proto.authority import ClusterAuthority
from headrace_proto.plane import Certificate
from headrace_router.access.auth import check_exposure, check_metrics_exposure
from headrace_router.config import RouterConfig, new_router_id
from headrace_router.credentials import RouterCredentials


def run_router(spec: ClusterSpec, controller: str, credentials: Path | None) -> int:
    """Runs until SIGTERM. credentials: a file of `write_credentials`. Raises HeadraceError."""
    config = router_config(spec, controller)
    issue: Callable[[bytes], Certificate] | None = None
    if credentials is not None:
        found = RouterCredentials.read(credentials)
        encoded = SecretBytes(found.encode())
        given = {"credentials": encoded, "credentials_file": credentials, "router_id": found.name}
        config = config.model_copy(update=given)
    elif spec.control.secret_file is not None:
        secrets = ClusterSecrets(spec.control.secret_file)
        config, issue = admitted(config, secrets), issuer(secrets, config.router_id)
    else:
        raise SpecError(
            f"a router needs credentials: --credentials FILE, made by `{program_name()} credentials`, or --secret-file "
            f"(`{program_name()} controller` shows the path of its own)"
        )
    if not port_of(controller):
        raise SpecError(f"--controller must be HOST:PORT, not '{controller}'")
    check_exposure(spec.routers.host, spec.auth)
    check_metrics_exposure(spec.metrics_host, spec.auth, no_auth=spec.routers.metrics_no_auth)
    return _run(config, issue)


def write_credentials(path: Path, secret_file: Path | None) -> None:
    """Makes the credentials of one router, for a machine that is not to have the secret. Raises SpecError."""
    if secret_file is None:
        raise SpecError("credentials are made from the cluster's secret: --secret-file FILE")
    authority = ClusterAuthority(ClusterSecrets(secret_file).current)
    try:
        RouterCredentials.issue(authority, new_router_id()).write(path)
    except OSError as error:
        raise SpecError(f"{path} cannot be written: {error.strerror}") from error


def run_from_stdin(parent: int) -> int:
    """Reads the config from a pipe; the process ends when its parent does."""
    if parent:
        set_parent_death_signal(parent)
    try:
        config = decode_config(sys.stdin.read())
    except (ValueError, KeyError):
        print(
            f"headrace: --config-stdin is for `{program_name()} serve`; otherwise pass --controller, and "
            "--credentials or --secret-file",
            file=sys.stderr,
        )
        return EXIT_CONFIG
    return _run(config)


def _run(config: RouterConfig, issue: Callable[[bytes], Certificate] | None = None) -> int:
    from headrace_router.main import run

    return run(config, issue)
