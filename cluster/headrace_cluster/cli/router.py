"""`headrace router`: standalone, or as a child process of `headrace serve`."""

import sys
from pathlib import Path

from headrace_cluster.errors import SpecError
from headrace_cluster.launch.display import show_message
from headrace_cluster.launch.router_process import EXIT_CONFIG, decode_config, router_config
from headrace_cluster.local import state
from headrace_cluster.local.processes import set_parent_death_signal
from headrace_cluster.local.router_credentials import issuer, new_credentials
from headrace_cluster.local.secret_file import ClusterSecrets
from headrace_cluster.local.state import describe
from headrace_cluster.program import program_name
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_proto.address import port_of
from headrace_proto.component import CertificateIssuer
from headrace_router.access.auth import check_exposure, check_metrics_exposure
from headrace_router.config import RouterConfig
from headrace_router.credentials import RouterCredentials


def run_router(spec: ClusterSpec, controller: str, credentials: Path | None) -> int:
    """Runs until SIGTERM. credentials: a file of `write_credentials`. Raises HeadraceError."""
    issue: CertificateIssuer | None = None
    if credentials is not None:
        found = RouterCredentials.read(credentials)
        config = router_config(spec, controller, found, credentials_file=credentials)
    elif spec.control.secret_file is not None:
        secrets = ClusterSecrets(spec.control.secret_file)
        issued = new_credentials(secrets)
        config, issue = router_config(spec, controller, issued), issuer(secrets, issued.name)
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
    """Makes the credentials of one router, for a machine that is not to have the secret. Raises SpecError.

    secret_file: None = that of the only server of this user.
    """
    if path.exists():
        raise SpecError(f"{path} exists, and two routers do not share credentials: name another file")
    made = new_credentials(ClusterSecrets(secret_file or _own_secret_file()))
    try:
        made.write(path)
    except OSError as error:
        raise SpecError(f"{path} cannot be written: {error.strerror}") from error
    router = f"{program_name()} router --controller HOST:PORT --credentials {path}"
    show_message(f"{path} is written, for one router: {router}")


def _own_secret_file() -> Path:
    servers = [server for server in state.running() if server.secret_file]
    if len(servers) == 1:
        return Path(servers[0].secret_file)
    found = "; ".join(f"{describe(server)}: {server.secret_file}" for server in servers) or "no server of yours runs"
    raise SpecError(f"credentials are made from the cluster's secret: name it with --secret-file FILE ({found})")


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


def _run(config: RouterConfig, issue: CertificateIssuer | None = None) -> int:
    from headrace_router.main import run

    return run(config, issue)
