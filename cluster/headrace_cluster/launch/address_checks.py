"""Checks that a server may and can listen on its addresses; suggests free ports for those in use."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from headrace_cluster.local import state
from headrace_cluster.local.ports import free_port_after, is_taken
from headrace_cluster.local.state import ServeState, describe
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_proto.cluster_member import SecretFile
from headrace_proto.errors import ListenError
from headrace_router.access.auth import check_exposure, check_metrics_exposure
from headrace_router.access.tls_files import check_tls_files, load_tls_files


@dataclass(frozen=True, slots=True)
class Address:
    """The address of one flag: `count` consecutive ports from `port` on."""

    flag: str
    host: str
    port: int  # 0 = any free one
    count: int = 1

    @property
    def ports(self) -> range:
        return range(self.port, self.port + self.count) if self.port else range(0)


def check_tls(spec: ClusterSpec) -> None:
    """Whether the files of TLS can be used. Raises TlsFileError, PrivateFileError."""
    if spec.tls.enabled:
        check_tls_files(spec.tls, load_tls_files(spec.tls))


def check_secrets(spec: ClusterSpec) -> None:
    """Whether the files of the controller's secrets can be used. Raises SecretFileError, PrivateFileError."""
    if spec.control.secret_file is not None:
        SecretFile(spec.control.secret_file)
    if spec.admin.key_file is not None:
        SecretFile(spec.admin.key_file, "the admin key file")


def check_keys(spec: ClusterSpec) -> None:
    """Whether routers may listen on their interface, and can read their keys. Raises a HeadraceError."""
    check_exposure(spec.routers.host, spec.auth)
    check_metrics_exposure(spec.metrics_host, spec.auth, no_auth=spec.routers.metrics_no_auth)
    spec.auth.load_all()


def check_ports(spec: ClusterSpec, *, with_router: bool) -> None:
    """Raises one ListenError for all ports in use, with a free port for each of their flags."""
    addresses = _addresses(spec, with_router=with_router)
    taken = {(each, port): None for each in addresses for port in each.ports if is_taken(each.host, port, each.flag)}
    if not taken:
        return
    others = [server for server in state.running() if server.pid != os.getpid()]
    used: dict[tuple[str, str], list[int]] = {}  # by host and what uses them
    for address, port in taken:
        used.setdefault((address.host, _user(port, others)), []).append(port)
    parts = " and ".join(_in_use(host, by, ports) for (host, by), ports in used.items())
    moved = list(dict.fromkeys(address for address, _ in taken))
    flags = " and ".join(address.flag for address in moved)
    if spec.routers.metrics_port is None and "--admin-port" in flags:  # by default they follow the admin port
        moved += [each for each in addresses if each.flag == "--metrics-port" and each not in moved]
    raise ListenError(
        f"{parts}; choose {'another' if len(taken) == 1 else 'others'} with {flags}: "
        f"add {_free_flags(addresses, moved, others)}"
    )


def _addresses(spec: ClusterSpec, *, with_router: bool) -> list[Address]:
    admin = Address("--admin-port", spec.admin.host, spec.admin.port)
    if not with_router:
        return [admin]
    routers, metrics = spec.routers, spec.metrics_ports
    own = [Address("--metrics-port", spec.metrics_host, metrics[0], len(metrics))] if metrics else []
    return [
        Address("--port", routers.host, routers.port),
        Address("--grpc-port", routers.host, routers.grpc_port),
        admin,
        *own,
    ]


def _user(port: int, servers: Sequence[ServeState]) -> str:
    """' by headrace (…)' for a server of this user; servers that are starting come last: they may not listen yet."""
    known = sorted((server for server in servers if port in server.ports), key=lambda server: server.starting)
    return f" by {describe(known[0])}" if known else ""


def _in_use(host: str, by: str, ports: Sequence[int]) -> str:
    if len(ports) == 1:
        return f"port {ports[0]} on {host} is in use{by}"
    return f"ports {', '.join(map(str, ports[:-1]))} and {ports[-1]} on {host} are in use{by}"


def _free_flags(addresses: Sequence[Address], moved: Sequence[Address], others: Sequence[ServeState]) -> str:
    """'--grpc-port 9001 --admin-port 9002': the next free ports above the HTTP port, else above the first in use."""
    avoid = {port for address in addresses for port in address.ports} | {port for each in others for port in each.ports}
    after = next((address.port for address in addresses if address.flag == "--port" and address.port), moved[0].port)
    flags: list[str] = []
    for address in addresses:
        if address in moved:
            first = free_port_after(address.host, after, address.count, avoid)
            avoid.update(range(first, first + address.count))
            flags.append(f"{address.flag} {first}")
    return " ".join(flags)
