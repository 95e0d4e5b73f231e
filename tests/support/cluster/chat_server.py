"""A scripted chat server: the last message selects its response. It records requests and disconnects of clients."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

USAGE = {"prompt_tokens": 57, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 48}}


class ChatServer:
    """Messages: count = an endless answer, wait = none, break = half of one, error = an error event, refuse = 400.

    All others have a short answer; that of "long" ends at the limit of tokens.
    """

    def __init__(self, port: int = 0) -> None:
        outer = self
        self.requests: list[dict[str, Any]] = []
        self.client_left = Event()  # a client disconnected during a count
        self.end_count = Event()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.send_document(200, {"data": [{"id": "tiny"}, {"id": "small"}]})

            def do_POST(self) -> None:
                outer.answer(self)

            def send_document(self, status: int, document: dict[str, Any]) -> None:
                content = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def send_chunk(self, content: bytes) -> None:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))

            def send_event(self, event: dict[str, Any] | str) -> None:
                text = event if isinstance(event, str) else json.dumps(event)
                self.send_chunk(f"data: {text}\n\n".encode())

            def send_text(self, text: str, finish_reason: str | None = None) -> None:
                choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}
                self.send_event({"choices": [choice]})

            def log_message(self, format: str, *args: object) -> None:
                return

        self._handler = Handler
        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def messages(self) -> list[str]:
        """The last message of each request."""
        return [request["messages"][-1]["content"] for request in self.requests]

    def answer(self, handler: Any) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        self.requests.append(body)
        message = body["messages"][-1]["content"]
        if message == "refuse":
            handler.send_document(400, {"error": {"message": "the prompt is too long"}})
            return
        if message == "wait":
            self.end_count.wait()
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        if message == "count":
            self._count(handler)
        elif message == "break":
            handler.send_text("half")
            handler.close_connection = True
        elif message == "error":
            handler.send_text("half")
            handler.send_event({"error": {"message": "the server is stopping"}})
            handler.send_chunk(b"")
        else:
            for text in ("Grüß", " Gott,", " 世界"):
                handler.send_text(text)
            handler.send_text("", finish_reason="length" if message == "long" else "stop")
            if "stream_options" in body:
                handler.send_event({"choices": [], "usage": USAGE})
            handler.send_event("[DONE]")
            handler.send_chunk(b"")

    def _count(self, handler: Any) -> None:
        number = 0
        try:
            while not self.end_count.wait(0.02):
                number += 1
                handler.send_text(f" {number}")
            handler.send_event("[DONE]")
            handler.send_chunk(b"")
        except OSError:
            self.client_left.set()

    def close(self) -> None:
        self.end_count.set()
        self._server.shutdown()
        self._server.server_close()
