"""Chooses the running server of a client command, by its flags or the environment. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace_cluster.errors import NotRunningError, ServerChoiceError
from headrace_cluster.local.state import ServeState, describe
from headrace_cluster.program import program_name


@dataclass(frozen=True, slots=True)
class ServerChoice:
    """Criteria for a server; all must match. `names` and `port` may be any of its names and ports."""

    port: int | None = None
    admin_port: int | None = None
    names: tuple[str, ...] = ()
    given: str = ""  # as it was written: '--port 9000'
    url: str = ""  # URL of the admin API of a cluster elsewhere; nothing else is given then

    def matches(self, server: ServeState) -> bool:
        """Whether this server matches all criteria."""
        return (
            (self.port is None or self.port in server.ports)
            and (self.admin_port is None or self.admin_port == server.admin_port)
            and {server.cluster, *server.models, *map(str, server.ports)}.issuperset(self.names)
        )


def choose(choice: ServerChoice, servers: Sequence[ServeState]) -> ServeState | None:
    """The one server of this machine that matches; None when none does. Raises ServerChoiceError when several do."""
    if choice.url:
        raise ServerChoiceError(f"this command is for servers on this machine, not for {choice.url}")
    matching = [server for server in servers if choice.matches(server)]
    if len(matching) > 1:
        which = f"{choice.given} fits {len(matching)} servers" if choice.given else f"{len(matching)} servers run"
        raise ServerChoiceError(f"{which}; name one by a port (--port PORT){running_servers(matching)}")
    return matching[0] if matching else None


def no_match_error(choice: ServerChoice, servers: Sequence[ServeState]) -> NotRunningError:
    """The error for a choice that no server matches."""
    given = f" with {choice.given}" if choice.given else ""
    return NotRunningError(f"no server runs{given}; start one with: {program_name()} serve{running_servers(servers)}")


def running_servers(servers: Sequence[ServeState]) -> str:
    """The end of a sentence, such as '; running: headrace (smollm2, HTTP 8000, …)'; empty when none runs."""
    return "; running: " + "; ".join(describe(server) for server in servers) if servers else ""
