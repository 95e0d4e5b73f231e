"""The admin API of a running server, with the standard library only: client commands run within a second."""

import http.client
import json
import os
import ssl
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headrace_base.address import host_port, split_address
from headrace_base.private_file import read_private
from headrace_cluster.cli.servers import ServerChoice, choose, no_match_error
from headrace_cluster.errors import CertificateError, NotRunningError, ServerError, SpecError
from headrace_cluster.launch.display import show_message
from headrace_cluster.local import state
from headrace_cluster.local.state import ServeState, describe
from headrace_cluster.local.tls_client import open_connection, tls_failure, tls_of, trusted
from headrace_cluster.program import program_name

DEFAULT_ADMIN_PORT = 8002
TIMEOUT_SECONDS = 5.0
RESTART_SECONDS = 60.0  # for another controller to answer after one was lost; see controller_process.py
RETRY_SECONDS = 0.25  # between two requests to a controller that does not answer


class AdminClient:
    """The admin API of a server on this machine, whose key is in the state folder, or of one elsewhere, by its URL."""

    def __init__(self, choice: ServerChoice) -> None:
        """Raises NotRunningError when no server matches, ServerChoiceError when several do, SpecError without a key."""
        self.state = None if choice.url else choose(choice, state.running())
        self._key = os.environ.get("HEADRACE_ADMIN_KEY", "")
        # A context per call: a long command may outlast a certificate.
        ca = os.environ.get("HEADRACE_CA", "")
        verified = partial(trusted, Path(ca) if ca else None)
        self._tls: Callable[[], ssl.SSLContext | None] = lambda: None
        if choice.url:
            is_https, self._host, self._port = _parts(choice.url)
            self._key = _key_in_file() or self._key
            if not self._key:
                raise SpecError(
                    f"the admin API at {choice.url} needs its key: --admin-key-file FILE before the command"
                )
            self._tls = verified if is_https else self._tls
        elif self.state is not None:
            self._host, self._port = split_address(self.state.admin_url)
            self._key = self._key or self.state.admin_key
            self._tls = partial(tls_of, self.state)
        elif self._key and (choice.admin_port is not None or not choice.given):
            # The server is another user's, or its port is forwarded to this machine.
            self._host, self._port = "127.0.0.1", choice.admin_port or DEFAULT_ADMIN_PORT
            self._tls = verified if ca else self._tls
        else:
            raise no_match_error(choice, state.running())

    def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout: float = TIMEOUT_SECONDS
    ) -> dict[str, Any]:
        """The answer's document. Raises NotRunningError, ServerError, CertificateError."""
        if self.state is not None and self.state.starting:
            raise starting_error(self.state)
        connection = open_connection(self._host, self._port, timeout, self._tls())
        try:
            sent = json.dumps(body) if body is not None else None
            connection.request(method, path, sent, {"Authorization": f"Bearer {self._key}"})
            response = connection.getresponse()
            if response.status not in (200, 202):
                raise ServerError(error_sentence(response))
            document: dict[str, Any] = json.load(response)
        except (OSError, http.client.HTTPException, ValueError) as error:
            address = host_port(self._host, self._port)
            if failed := tls_failure(address, error):
                raise failed from error
            sentence = f"no server answers at {address}, the admin API; start one with: {program_name()} serve"
            if self.state is not None and self.state.process.alive:
                sentence = f"the controller of {describe(self.state)} does not answer; try again in a few seconds"
            raise NotRunningError(sentence) from error
        finally:
            connection.close()
        return document

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
                    sentence = f"the controller has not answered for {RESTART_SECONDS:g} s"
                    raise ServerError(f"{sentence}; see `{program_name()} logs controller`") from error
            time.sleep(RETRY_SECONDS)


def _parts(url: str) -> tuple[bool, str, int]:
    """Whether it is https, host and port. Raises SpecError."""
    parts = urlsplit(url)
    try:
        if parts.hostname and not parts.path.strip("/") and not parts.query:
            return parts.scheme == "https", parts.hostname, parts.port or DEFAULT_ADMIN_PORT
    except ValueError:  # the port is no number
        pass
    raise SpecError(f"--cluster must be like https://HOST:{DEFAULT_ADMIN_PORT}, not '{url}'")


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


def starting_error(server: ServeState) -> NotRunningError:
    """For a server that does not listen yet."""
    return NotRunningError(f"{describe(server)} is starting and cannot answer yet; try again in a moment")


def error_sentence(response: http.client.HTTPResponse) -> str:
    """The message of an answer that is an error."""
    try:
        return str(json.load(response)["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError, http.client.HTTPException):
        return f"the server answered with status {response.status}; is this the right port?"
