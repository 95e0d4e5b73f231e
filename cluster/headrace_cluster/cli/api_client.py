"""The public API of a running server, with the standard library only: client commands run within a second."""

import contextlib
import http.client
import json
import ssl
import urllib.parse
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace_base.address import host_port, split_address
from headrace_cluster.cli.admin_client import error_sentence, starting_error
from headrace_cluster.cli.servers import ServerChoice, choose, no_match_error, running_servers
from headrace_cluster.errors import AnswerCutError, NotRunningError, ServerError, SpecError
from headrace_cluster.local import state
from headrace_cluster.local.state import describe
from headrace_cluster.local.tls_client import (
    handshake_closed,
    open_connection,
    present,
    reachable,
    tls_failure,
    tls_of,
    trusted,
)
from headrace_cluster.program import program_name

DEFAULT_PORT = 8000
TIMEOUT_SECONDS = 5.0
STREAM_SECONDS = 120.0  # without data; the server sends a comment every 15 s
_NO_KEY = "the server needs an API key, and got none that is valid: pass --api-key KEY or set HEADRACE_API_KEY"
_NOT_THE_API = "the answer is not one of the OpenAI API; is this the right port?"


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """One event of a streamed answer. calls: parts of calls of tools, as in OpenAI's API. usage: token counts, in the
    last event, if requested.
    """

    text: str = ""
    reasoning: str = ""
    calls: tuple[dict[str, Any], ...] = ()
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

    @property
    def url(self) -> str:
        """As other programs write it, without a path."""
        return f"{'https' if self._tls is not None else 'http'}://{host_port(self._host, self._port)}"

    def models(self) -> list[str]:
        """Model names for requests."""
        return [str(entry["id"]) for entry in self.described()]

    def described(self) -> list[dict[str, Any]]:
        """The models, as the API lists them."""
        found = self._json("GET", "/v1/models", None, TIMEOUT_SECONDS).get("data")
        if not isinstance(found, list) or not all(isinstance(entry, dict) and "id" in entry for entry in found):
            raise ServerError(_NOT_THE_API)
        return found

    def describe(self, model: str) -> dict[str, Any]:
        """The model with this name or alias."""
        return self._json("GET", f"/v1/models/{urllib.parse.quote(model)}", None, TIMEOUT_SECONDS)

    def ready(self) -> bool:
        """Whether a model is served. Raises NotRunningError where nothing answers yet."""
        try:
            self._json("GET", "/health/ready", None, TIMEOUT_SECONDS)
        except ServerError:
            return False
        return True

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The whole answer to a request of any of the APIs."""
        return self._json("POST", path, body, STREAM_SECONDS)

    def _json(self, method: str, path: str, body: dict[str, Any] | None, timeout: float) -> dict[str, Any]:
        with self._request(method, path, body, timeout) as response:
            try:
                found = json.load(response)
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise ServerError(_NOT_THE_API) from error
        if not isinstance(found, dict):
            raise ServerError(_NOT_THE_API)
        return found

    def chat(self, body: dict[str, Any]) -> Generator[ChatDelta, None, None]:
        """The answer as it arrives. Closing the generator closes the connection, which ends the request at the server.

        Raises AnswerCutError when the connection ends before the answer does.
        """
        with self._request("POST", "/v1/chat/completions", body | {"stream": True}, STREAM_SECONDS) as response:
            with contextlib.suppress(OSError, http.client.HTTPException):
                while line := response.readline():
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
            except (OSError, OverflowError, UnicodeError, http.client.HTTPException) as error:
                address = host_port(self._host, self._port)
                if isinstance(error, TimeoutError):
                    raise NotRunningError(f"the server at {address} sent nothing for {timeout:g} s") from error
                failed = tls_failure(address, error) or handshake_closed(address, error)
                if self._tls is not None and failed is not None:
                    raise failed from error
                raise NotRunningError(
                    f"no server answers at {address}; start one with: {program_name()} serve"
                    + running_servers(state.running())
                ) from error
            with response:
                if response.status == http.client.UNAUTHORIZED:
                    raise ServerError(_NO_KEY)
                if response.status != 200:
                    raise ServerError(error_sentence(response))
                yield response


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
    server = choose(choice, state.running()) if host is None else None
    if server is not None and server.starting:
        raise starting_error(server)
    if server is not None and server.http_url:
        tls = tls_of(server)
        return ApiClient(*split_address(server.http_url), api_key, tls and present(tls, client_cert))
    if server is not None:
        raise NotRunningError(
            f"the routers of {describe(server)} are started elsewhere: name one with --port, or --host and --port; "
            f"`{program_name()} status` lists them"
        )
    if host is None and choice.given and (choice.port is None or choice.names or choice.admin_port is not None):
        raise no_match_error(choice, state.running())
    scheme, _, name = (host or "127.0.0.1").rpartition("://")
    if scheme not in ("", "http", "https"):
        raise SpecError(f"--host is HOST, http://HOST or https://HOST, not '{host}'")
    tls = trusted(ca, client_cert) if scheme == "https" or (ca is not None and not scheme) else None
    name, _, port = name.partition("/")[0].partition(":") if name.count(":") == 1 else (name.partition("/")[0], "", "")
    if port and not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise SpecError(f"--host is HOST, HOST:PORT, http://HOST or https://HOST, not '{host}'")
    return ApiClient(name, choice.port or int(port or DEFAULT_PORT), api_key, tls)


def _delta(data: str) -> ChatDelta:
    try:
        event = json.loads(data)
        if event.get("error"):
            raise ServerError(str(event["error"]["message"]))
        usage, choices = event.get("usage"), event["choices"]
        if not choices:
            return ChatDelta(usage=usage)
        delta = choices[0]["delta"]
        return ChatDelta(
            delta.get("content") or "",
            delta.get("reasoning_content") or delta.get("reasoning") or "",
            tuple(delta.get("tool_calls") or ()),
            choices[0].get("finish_reason"),
            usage,
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ServerError(_NOT_THE_API) from error
