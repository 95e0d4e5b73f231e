"""HTTP to a running server with the standard library alone: client commands answer within a second."""

import http.client
import json
from collections.abc import Iterator
from typing import Any

from headrace_cluster import state
from headrace_cluster.errors import NotRunningError
from headrace_cluster.ports import host_port, reachable
from headrace_proto.errors import HeadraceError

TIMEOUT_SECONDS = 5.0
STREAM_SECONDS = 120.0  # of silence; the server sends a comment every 15 s


class ServerError(HeadraceError):
    """The server answered with an error; the sentence is its own."""


class ApiClient:
    """The public API. Raises NotRunningError when nothing answers, ServerError when it says no."""

    def __init__(self, host: str, port: int, api_key: str | None) -> None:
        self._host = reachable(host).strip("[]")
        self._port = port
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def models(self) -> list[str]:
        """Names that requests can use."""
        with self._request("GET", "/v1/models", None, TIMEOUT_SECONDS) as response:
            return [str(entry["id"]) for entry in json.load(response)["data"]]

    def chat(self, body: dict[str, Any]) -> Iterator[str]:
        """The answer's text as it comes."""
        with self._request("POST", "/v1/chat/completions", body | {"stream": True}, STREAM_SECONDS) as response:
            for line in response:
                data = line.decode().strip()
                if not data.startswith("data:") or data == "data: [DONE]":
                    continue
                event = json.loads(data.removeprefix("data:"))
                if "error" in event:
                    raise ServerError(str(event["error"]["message"]))
                for choice in event["choices"]:
                    if text := choice["delta"].get("content"):
                        yield text

    def _request(self, method: str, path: str, body: dict[str, Any] | None, timeout: float) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout)
        headers = dict(self._headers)
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            connection.request(method, path, json.dumps(body) if body is not None else None, headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise NotRunningError(
                f"no server answers at {host_port(self._host, self._port)}; start one with: {_serve(self._port)}"
            ) from error
        if response.status != 200:
            raise ServerError(_sentence(response))
        return response


class AdminClient:
    """The admin API of a serve on this machine; its key comes from the state folder or HEADRACE_ADMIN_KEY."""

    def __init__(self, port: int) -> None:
        import os

        self._port = port
        self.state = state.last(port)
        self._key = os.environ.get("HEADRACE_ADMIN_KEY", "") or (self.state.admin_key if self.state is not None else "")
        if not self._key:
            raise NotRunningError(self._nobody())

    def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout: float = TIMEOUT_SECONDS
    ) -> dict[str, Any]:
        """The answer's document. Raises NotRunningError, ServerError."""
        host = "127.0.0.1"
        if self.state is not None:
            host = self.state.admin_url.removeprefix("http://").rpartition(":")[0].strip("[]")
        connection = http.client.HTTPConnection(host, self._port, timeout=timeout)
        try:
            sent = json.dumps(body) if body is not None else None
            connection.request(method, path, sent, {"Authorization": f"Bearer {self._key}"})
            response = connection.getresponse()
            if response.status not in (200, 202):
                raise ServerError(_sentence(response))
            document: dict[str, Any] = json.load(response)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NotRunningError(self._nobody()) from error
        finally:
            connection.close()
        return document

    def _nobody(self) -> str:
        others = [str(entry.admin_port) for entry in state.running() if entry.admin_port != self._port]
        hint = f"; servers run with --admin-port {', '.join(others)}" if others else ""
        return f"no server answers on admin port {self._port}{hint}; start one with: ./headrace serve"


def _serve(port: int) -> str:
    return "./headrace serve" if port == 8000 else f"./headrace serve --port {port}"


def _sentence(response: http.client.HTTPResponse) -> str:
    try:
        return str(json.load(response)["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        return f"the server answered with status {response.status}; is this the right port?"
