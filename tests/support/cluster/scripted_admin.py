"""An admin API with scripted responses, one after the other; the last one repeats.

Status 0 closes the connection without a response, like a lost controller.
"""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class ScriptedAdmin:
    """`answers`: by path, (status, document) in order. Records the requests."""

    def __init__(self, answers: dict[str, list[tuple[int, dict[str, Any]]]]) -> None:
        outer = self
        self.requests: list[tuple[str, Any]] = []
        self._answers = answers

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer._respond(self)

            def do_POST(self) -> None:
                outer._respond(self)

            def log_message(self, format: str, *args: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = int(self._server.server_address[1])
        Thread(target=self._server.serve_forever, daemon=True).start()

    def _respond(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        if handler.headers["Authorization"] != "Bearer the-key":
            self._send(handler, 401, {"error": {"message": "the admin key is wrong"}})
            return
        self.requests.append((handler.path, json.loads(body) if body else None))
        script = self._answers[handler.path]
        self._send(handler, *(script.pop(0) if len(script) > 1 else script[0]))

    @staticmethod
    def _send(handler: BaseHTTPRequestHandler, status: int, document: dict[str, Any]) -> None:
        if not status:
            return
        handler.send_response(status)
        handler.end_headers()
        handler.wfile.write(json.dumps(document).encode())

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
