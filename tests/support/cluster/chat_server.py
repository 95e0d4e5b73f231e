"""A scripted chat server: the last message selects its response. It records requests and disconnects of clients."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

USAGE = {"prompt_tokens": 57, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 48}}


class ChatServer(ThreadingHTTPServer):
    """Messages: count = an endless answer, break = half of one, error = an error event, refuse = 400.

    All others have a short answer; that of "long" ends at the limit of tokens.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[dict[str, Any]] = []
        self.client_left = Event()  # a client disconnected during a count
        self.end_count = Event()
        self.port = self.server_address[1]
        Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def messages(self) -> list[str]:
        """The last message of each request."""
        return [request["messages"][-1]["content"] for request in self.requests]

    def close(self) -> None:
        self.end_count.set()
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: ChatServer

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "tiny"}, {"id": "small"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        message = body["messages"][-1]["content"]
        self.send_response(400 if message == "refuse" else 200)
        self.end_headers()
        if message == "refuse":
            self.wfile.write(b'{"error": {"message": "the prompt is too long"}}')
        elif message == "count":
            self._count()
        elif message in ("break", "error"):
            self._send_text("half")
            if message == "error":
                self._send({"error": {"message": "the server is stopping"}})
        else:
            for text in ("Grüß", " \x1b[31mGott\x07,", " 世界"):
                self._send_text(text)
            self._send_text("", "length" if message == "long" else "stop")
            self._send({"choices": [], "usage": USAGE if "stream_options" in body else None})
            self.wfile.write(b"data: [DONE]\n\n")

    def _count(self) -> None:
        number = 0
        try:
            while not self.server.end_count.wait(0.02):
                number += 1
                self._send_text(f" {number}")
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            self.server.client_left.set()

    def _send(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def _send_text(self, text: str, end: str | None = None) -> None:
        self._send({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": end}]})

    def log_message(self, format: str, *args: object) -> None:
        return
