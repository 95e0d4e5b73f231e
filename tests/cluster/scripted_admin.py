"""An admin API that says what it is told to, one answer after the other; the last one stays."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class ScriptedAdmin:
    """`answers`: by path, (status, document) in order. Keeps what it was asked."""

    def __init__(self, answers: dict[str, list[tuple[int, dict[str, Any]]]]) -> None:
        outer = self
        self.asked: list[tuple[str, Any]] = []
        self._answers = answers

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer._take(self)

            def do_POST(self) -> None:
                outer._take(self)

            def log_message(self, format: str, *args: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = int(self._server.server_address[1])
        Thread(target=self._server.serve_forever, daemon=True).start()

    def _take(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        if handler.headers["Authorization"] != "Bearer the-key":
            self._send(handler, 401, {"error": {"message": "the admin key is wrong"}})
            return
        self.asked.append((handler.path, json.loads(body) if body else None))
        script = self._answers[handler.path]
        self._send(handler, *(script.pop(0) if len(script) > 1 else script[0]))

    @staticmethod
    def _send(handler: BaseHTTPRequestHandler, status: int, document: dict[str, Any]) -> None:
        handler.send_response(status)
        handler.end_headers()
        handler.wfile.write(json.dumps(document).encode())

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
