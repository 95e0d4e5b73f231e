"""HTTP to a running server with the standard library only: client commands run within a second."""

import contextlib
import http.client
import json
import os
import ssl
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headrace_cluster.cli.servers import ServerChoice, choose, no_match_error, running_servers
from headrace_cluster.errors import AnswerCutError, CertificateError, NotRunningError, ServerError, SpecError
from headrace_cluster.launch.display import show_message
from headrace_cluster.local import state
from headrace_cluster.local.ports import reachable
from headrace_cluster.local.state import ServeState, describe
from headrace_cluster.local.tls_client import handshake_closed, open_connection, present, tls_failure, tls_of, trusted
from headrace_cluster.program import program_name
from headrace_proto.address import host_port, split_address
from headrace_proto.errors import HeadraceError

DEFAULT_PORT = 8000
DEFAULT_ADMIN_PORT = 8002
PROBE_SECONDS = 1.0
TIMEOUT_SECONDS = 5.0
RESTART_SECONDS = 60.0  # for another controller to answer after one was lost; see controller_monitor.py
RETRY_SECONDS = 0.25  # between two requests to a controller that does not answer
STREAM_SECONDS = 120.0  # without data; the server sends a comment every 15 s
_NO_KEY = "this server needs an API key: pass --api-key KEY or set HEADRACE_API_KEY"
_WRONG_KEY = "the API key is not valid; pass another with --api-key KEY or HEADRACE_API_KEY"
_NOT_THE_API = "the answer is not one of the OpenAI API; is this the right port?"


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """One event of a streamed answer. usage: token counts, in the last event, if requested."""

    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None


class ApiClient:
    """The public API. Raises NotRunningError when nothing answers, ServerError when the answer is an error.

    With TLS also CertificateError.
    """

    def __init__(self, host: str, port: int, api_key: str | None, tls: ssl.SSLContext | None = None) -> None:
        """tls: None = plain HTTP."""
        self._tls = tls
        self._host = reachable(host).strip("[]")
        self._port = port
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise SpecError("an API key consists of printable ASCII characters; this one has others")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def models(self) -> list[str]:
        """Model names for requests."""
        return list(self._models())

    def defaults(self, model: str) -> dict[str, Any]:
        """A model's default values for request fields, as listed by the server."""
        return self._models().get(model, {}).get("defaults") or {}

    def _models(self) -> dict[str, dict[str, Any]]:
        with self._request("GET", "/v1/models", None, TIMEOUT_SECONDS) as response:
            try:
                return {str(entry["id"]): dict(entry) for entry in json.load(response)["data"]}
            except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
                raise ServerError(_NOT_THE_API) from error

    def chat(self, body: dict[str, Any]) -> Generator[ChatDelta, None, None]:
        """The answer as it arrives. Closing the generator closes the connection, which ends the request at the server.

        Raises AnswerCutError when the connection ends before the answer does.
        """
        with self._request("POST", "/v1/chat/completions", body | {"stream": True}, STREAM_SECONDS) as response:
            for line in _lines(response):
                data = line.decode("utf-8", "replace").strip()
                if data == "data: [DONE]":
                    return
                if data.startswith("data:"):
                    yield _delta(data.removeprefix("data:"))
            raise AnswerCutError("the server closed the connection before the answer was complete")

    @contextlib.contextmanager
    def _request(
        self, method: str, path: str, body: dict[str, Any] | None, timeout: float
    ) -> Iterator[http.client.HTTPResponse]:
        connection = open_connection(self._host, self._port, timeout, self._tls)
        headers = dict(self._headers)
        if body is not None:
            headers["Content-Type"] = "application/json"
        with contextlib.closing(connection):
            try:
                connection.connect()
                # A server may reject a body that is too large, and close, before all of it is sent.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    connection.request(method, path, json.dumps(body) if body is not None else None, headers)
                response = connection.getresponse()
            except TimeoutError as error:
                address = host_port(self._host, self._port)
                raise NotRunningError(f"the server at {address} sent nothing for {timeout:g} s") from error
            except (OSError, OverflowError, UnicodeError, http.client.HTTPException) as error:
                address = host_port(self._host, self._port)
                failed = tls_failure(address, error) or handshake_closed(address, error)
                if self._tls is not None and failed is not None:
                    raise failed from error
                raise NotRunningError(
                    f"no server answers at {address}; start one with: {_serve(self._port)}"
                    + running_servers(state.running())
                ) from error
            with response:
                if response.status == http.client.UNAUTHORIZED:
                    raise ServerError(_WRONG_KEY if self._headers else _NO_KEY)
                if response.status != 200:
                    raise ServerError(_sentence(response))
                yield response


class AdminClient:
    """The admin API of a server on this machine; its key comes from the state folder or HEADRACE_ADMIN_KEY."""

    def __init__(self, choice: ServerChoice) -> None:
        """Raises NotRunningError when no server matches, ServerChoiceError when several do."""
        self.state = find_server(choice)
        key = os.environ.get("HEADRACE_ADMIN_KEY", "")
        if self.state is not None:
            self._address = _admin_address(self.state, key)
        elif key and (choice.admin_port is not None or not choice.given):  # of another user, or forwarded to here
            ca = os.environ.get("HEADRACE_CA", "")
            tls = partial(trusted, Path(ca)) if ca else lambda: None
            self._address = _AdminAddress("127.0.0.1", choice.admin_port or DEFAULT_ADMIN_PORT, key, tls)
        else:
            raise no_match_error(choice, state.running())
        self.flag = f"--admin-port {self._address.port}"  # selects this server among all others

    def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout: float = TIMEOUT_SECONDS
    ) -> dict[str, Any]:
        """The answer's document. Raises NotRunningError, ServerError."""
        if self.state is not None and self.state.starting:
            raise _starting(self.state)
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
class _AdminAddress:
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
                raise ServerError(_sentence(response))
            document: dict[str, Any] = json.load(response)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if failed := tls_failure(host_port(self.host, self.port), error):
                raise failed from error
            raise NotRunningError(
                f"no server answers on admin port {self.port}; start one with: {program_name()} serve"
            ) from error
        finally:
            connection.close()
        return document


def _admin_address(server: ServeState, key: str = "") -> _AdminAddress:
    return _AdminAddress(*split_address(server.admin_url), key or server.admin_key, partial(tls_of, server))


def find_server(choice: ServerChoice) -> ServeState | None:
    """The server of this user that matches; None when none does. Raises ServerChoiceError when several do."""
    still_up = [server for server in state.ended() if _still_answers(server)]
    return choose(choice, state.running()) or choose(choice, still_up)


def api_client(
    choice: ServerChoice,
    host: str | None,
    api_key: str | None,
    *,
    ca: Path | None = None,
    client_cert: Path | None = None,
) -> ApiClient:
    """The public API of the server that matches, or of the server at `host` and the given port.

    ca: authorities for the certificate of a server elsewhere, which then uses TLS; so does a host as https://HOST.
    Raises ServerChoiceError when several servers match, NotRunningError when none does and no address was given,
    CertificateError.
    """
    server = find_server(choice) if host is None else None
    if server is not None and server.starting:
        raise _starting(server)
    if server is not None and server.http_url:
        tls = tls_of(server)
        return ApiClient(*split_address(server.http_url), api_key, tls and present(tls, client_cert))
    if server is not None:
        raise NotRunningError(f"{describe(server)} runs without a router: `{program_name()} router` starts one")
    if host is None and choice.given and (choice.port is None or choice.names or choice.admin_port is not None):
        raise no_match_error(choice, state.running())
    scheme, _, name = (host or "127.0.0.1").rpartition("://")
    if scheme not in ("", "http", "https"):
        raise SpecError(f"--host is HOST, http://HOST or https://HOST, not '{host}'")
    tls = trusted(ca, client_cert) if scheme == "https" or (ca is not None and not scheme) else None
    return ApiClient(name.rstrip("/"), choice.port or DEFAULT_PORT, api_key, tls)


def _starting(server: ServeState) -> NotRunningError:
    return NotRunningError(f"{describe(server)} is starting and cannot answer yet; try again in a moment")


def _still_answers(server: ServeState) -> bool:
    """Whether the cluster of a killed serve still answers."""
    try:
        _admin_address(server).call("GET", "/status", None, PROBE_SECONDS)
    except HeadraceError:
        return False
    return True


def _lines(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Lines of a stream until it ends or the connection breaks."""
    while True:
        try:
            line = response.readline()
        except TimeoutError as error:
            raise AnswerCutError(f"the server sent nothing for {STREAM_SECONDS:g} s") from error
        except (OSError, http.client.HTTPException):
            return
        if not line:
            return
        yield line


def _delta(data: str) -> ChatDelta:
    try:
        event = json.loads(data)
        if event.get("error"):
            raise ServerError(str(event["error"]["message"]))
        usage, choices = event.get("usage"), event["choices"]
        if not choices:
            return ChatDelta(usage=usage)
        return ChatDelta(choices[0]["delta"].get("content") or "", choices[0].get("finish_reason"), usage)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ServerError(_NOT_THE_API) from error


def _serve(port: int) -> str:
    return f"{program_name()} serve" + (f" --port {port}" if port != DEFAULT_PORT else "")


def _sentence(response: http.client.HTTPResponse) -> str:
    try:
        return str(json.load(response)["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError, http.client.HTTPException):
        return f"the server answered with status {response.status}; is this the right port?"
