"""Chooses the running server of a client command, by its flags or the environment. Pure."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from headrace_cluster.errors import NotRunningError, ServerChoiceError
from headrace_cluster.local.state import ServeState, describe
from headrace_cluster.program import program_name
from headrace_proto.address import port_of

HEADINGS = ("NAME", "MODELS", "HTTP", "GRPC", "ADMIN", "PROCESS", "SINCE")


@dataclass(frozen=True, slots=True)
class ServerChoice:
    """Criteria for a server; all must match. `names` and `port` may be any of its names and ports."""

    port: int | None = None
    admin_port: int | None = None
    names: tuple[str, ...] = ()
    given: str = ""  # as it was written: '--port 9000'
    url: str = ""  # of the admin API of a cluster elsewhere; nothing else is given then

    def matches(self, server: ServeState) -> bool:
        """Whether this server matches all criteria."""
        return (
            (self.port is None or self.port in server.ports)
            and (self.admin_port is None or self.admin_port == port_of(server.admin_url))
            and {server.cluster, *server.models, *map(str, server.ports)}.issuperset(self.names)
        )


def choose(choice: ServerChoice, servers: Sequence[ServeState]) -> ServeState | None:
    """The one server of this machine that matches; None when none does. Raises ServerChoiceError when several do."""
    if choice.url:
        raise ServerChoiceError(f"this command is for servers on this machine, not for {choice.url}")
    matching = [server for server in servers if choice.matches(server)]
    if len(matching) > 1:
        which = f"{choice.given} fits {len(matching)} servers" if choice.given else f"{len(matching)} servers run"
        raise ServerChoiceError(f"{which}; name one by a port (--port PORT):\n{table(matching)}")
    return matching[0] if matching else None


def no_match_error(choice: ServerChoice, servers: Sequence[ServeState]) -> NotRunningError:
    """The error for a choice that no server matches."""
    if not servers:
        missing = f"no server runs with {choice.given}" if choice.given else "no server runs"
        return NotRunningError(f"{missing}; start one with: {program_name()} serve")
    return NotRunningError(
        f"no server runs with {choice.given}; {program_name()} serve starts one{running_servers(servers)}"
    )


def running_servers(servers: Sequence[ServeState]) -> str:
    """The end of a sentence, such as '; running: headrace (smollm2, HTTP 8000, …)'; empty when none runs."""
    return "; running: " + "; ".join(describe(server) for server in servers) if servers else ""


def table(servers: Sequence[ServeState]) -> str:
    """One line per server, in columns."""
    rows = [HEADINGS, *(_row(server) for server in servers)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join("  " + line.rstrip() for line in lines)


def _row(server: ServeState) -> tuple[str, ...]:
    ports = (server.http_url, server.grpc_address, server.admin_url)
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(server.since)) + (" (starting)" if server.starting else "")
    numbers = (str(port_of(address) or "-") for address in ports)
    return (server.cluster, ", ".join(server.models), *numbers, str(server.pid), since)
