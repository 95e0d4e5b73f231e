"""The admin API of a running server, with the standard library only: client commands run within a second."""

import http.client
import json
import os
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headrace_cluster.cli.servers import ServerChoice, choose, no_match_error
from headrace_cluster.errors import CertificateError, NotRunningError, ServerError, SpecError
from headrace_cluster.launch.display import show_message
from headrace_cluster.local import state
from headrace_cluster.local.state import ServeState, describe
from headrace_cluster.local.tls_client import open_connection, tls_failure, tls_of, trusted
from headrace_cluster.program import program_name
from headrace_proto.address import host_port, split_address
from headrace_proto.private_file import read_private

DEFAULT_ADMIN_PORT = 8002
TIMEOUT_SECONDS = 5.0
RESTART_SECONDS = 60.0  # for another controller to answer after one was lost; see controller_process.py
RETRY_SECONDS = 0.25  # between two requests to a controller that does not answer


class AdminClient:
    """The admin API of a server on this machine, whose key is in the state folder, or of one elsewhere, by its URL."""

    def __init__(self, choice: ServerChoice) -> None:
        """Raises NotRunningError when no server matches, ServerChoiceError when several do, SpecError without a key."""
        self.state = None if choice.url else choose(choice, state.running())
        key = os.environ.get("HEADRACE_ADMIN_KEY", "")
        if choice.url:
            self._address = _remote_address(choice.url, _key_in_file() or key)
        elif self.state is not None:
            self._address = _admin_address(self.state, key)
        elif key and (choice.admin_port is not None or not choice.given):  # of another user, or forwarded to here
            port = choice.admin_port or DEFAULT_ADMIN_PORT
            self._address = AdminAddress("127.0.0.1", port, key, _ca_context if _ca() else lambda: None)
        else:
            raise no_match_error(choice, state.running())
        self._url = choice.url

    def command(self, words: str) -> str:
        """The text of another command for the same server."""
        if self._url:
            key_file = os.environ.get("HEADRACE_SERVER_KEY_FILE", "FILE")
            return f"{program_name()} --cluster {self._url} --admin-key-file {key_file} {words}"
        return f"{program_name()} {words} --admin-port {self._address.port}"

    def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout: float = TIMEOUT_SECONDS
    ) -> dict[str, Any]:
        """The answer's document. Raises NotRunningError, ServerError."""
        if self.state is not None and self.state.starting:
            raise starting_error(self.state)
        try:
            return self._address.call(method, path, body, timeout)
        except NotRunningError as error:
            if self.state is None or not self.state.process.alive:
                raise
            raise NotRunningError(
                f"the controller of {describe(self.state)} does not answer: it is started again, or the server stops; "
                "try again in a few seconds"
            ) from error

    def await_status(self) -> dict[str, Any]:
        """The document of GET /status; from the next controller if this one was lost.

        Raises NotRunningError if no process can start a controller, ServerError after RESTART_SECONDS.
        """
        deadline: float | None = None
        while True:
            try:
                return self.call("GET", "/status")
            except (NotRunningError, CertificateError) as error:  # a new certificate is served a second later
                # The process of a server of another user, or behind a tunnel, is unknown.
                if self.state is not None and (self.state.starting or not self.state.process.alive):
                    raise
                if deadline is None:
                    deadline = time.monotonic() + RESTART_SECONDS
                    show_message("the controller does not answer; waiting for it, or for the next one")
                if time.monotonic() >= deadline:
                    logs = f"`{program_name()} logs controller`"
                    raise ServerError(
                        f"the controller has not answered for {RESTART_SECONDS:g} s; see {logs}"
                    ) from error
            time.sleep(RETRY_SECONDS)


@dataclass(frozen=True, slots=True)
class AdminAddress:
    """Address and key of an admin API."""

    host: str
    port: int
    key: str
    tls: Callable[[], ssl.SSLContext | None]  # per call: a long command may outlast a certificate

    def call(self, method: str, path: str, body: dict[str, Any] | None, timeout: float) -> dict[str, Any]:
        connection = open_connection(self.host, self.port, timeout, self.tls())
        try:
            sent = json.dumps(body) if body is not None else None
            connection.request(method, path, sent, {"Authorization": f"Bearer {self.key}"})
            response = connection.getresponse()
            if response.status not in (200, 202):
                raise ServerError(error_sentence(response))
            document: dict[str, Any] = json.load(response)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if failed := tls_failure(host_port(self.host, self.port), error):
                raise failed from error
            raise NotRunningError(
                f"no server answers at {host_port(self.host, self.port)}, the admin API; start one with: "
                f"{program_name()} serve"
            ) from error
        finally:
            connection.close()
        return document


def _key_in_file() -> str:
    """The first line of the file in HEADRACE_SERVER_KEY_FILE; empty without one. Raises SpecError."""
    file = os.environ.get("HEADRACE_SERVER_KEY_FILE", "")
    if not file:
        return ""
    try:
        lines = read_private(Path(file), "the admin key file").decode("latin-1").split()
    except OSError as error:
        raise SpecError(f"the admin key file {file} cannot be read: {error.strerror}") from error
    return lines[0] if lines else ""


def _remote_address(url: str, key: str) -> "AdminAddress":
    """Raises SpecError."""
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or parts.path.strip("/") or parts.query:
        raise SpecError(f"--cluster must be like https://HOST:{DEFAULT_ADMIN_PORT}, not '{url}'")
    if not key:
        raise SpecError(f"the admin API at {url} needs its key: --admin-key-file FILE before the command")
    return AdminAddress(host, port or DEFAULT_ADMIN_PORT, key, _ca_context if parts.scheme == "https" else lambda: None)


def _ca() -> Path | None:
    given = os.environ.get("HEADRACE_CA", "")
    return Path(given) if given else None


def _ca_context() -> ssl.SSLContext:
    """Certificates of the authorities in HEADRACE_CA, by default those of this machine. Raises CertificateError."""
    return trusted(_ca())


def _admin_address(server: ServeState, key: str = "") -> AdminAddress:
    return AdminAddress(*split_address(server.admin_url), key or server.admin_key, partial(tls_of, server))


def starting_error(server: ServeState) -> NotRunningError:
    """For a server that does not listen yet."""
    return NotRunningError(f"{describe(server)} is starting and cannot answer yet; try again in a moment")


def error_sentence(response: http.client.HTTPResponse) -> str:
    """Of an answer that is an error."""
    try:
        return str(json.load(response)["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError, http.client.HTTPException):
        return f"the server answered with status {response.status}; is this the right port?"
