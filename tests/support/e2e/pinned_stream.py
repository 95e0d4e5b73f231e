"""A streamed completion on a connection whose router is known."""

import http.client
import json
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import psutil


class PinnedStream(threading.Thread):
    """Connects at once; streams when it is started, and records the end."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        self._connection.connect()
        self.own_port = int(self._connection.sock.getsockname()[1])
        self.body: dict[str, Any] = {}
        self.text = ""
        self.events = 0
        self.finished = False  # [DONE] was received
        self.failure = ""

    def run(self) -> None:
        """Reads events until the stream ends in any way."""
        body = json.dumps(self.body | {"stream": True})
        try:
            self._connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            for line in self._connection.getresponse():
                data = line.decode().strip().removeprefix("data: ")
                if data == "[DONE]":
                    self.finished = True
                elif data.startswith("{"):
                    self._record_event(json.loads(data))
            if not self.finished and not self.failure:
                self.failure = "the stream ended early"
        except (OSError, http.client.HTTPException) as error:
            self.failure = type(error).__name__
        finally:
            self._connection.close()

    def _record_event(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.failure = event["error"]["message"]
            return
        self.events += 1
        self.text += event["choices"][0]["text"]

    def disconnect(self) -> None:
        """Closes a connection that was not used."""
        self._connection.close()


def streams_at(url: str, pids: list[int], each: int) -> dict[int, list[PinnedStream]]:
    """`each` connections at each of these processes, which share a port; the kernel distributes them at random."""
    found: dict[int, list[PinnedStream]] = {pid: [] for pid in pids}
    for _ in range(40 * each):
        stream = PinnedStream(url)
        pid = _holder(pids, stream.own_port)
        if len(found[pid]) < each:
            found[pid].append(stream)
        else:
            stream.disconnect()
        if all(len(streams) == each for streams in found.values()):
            return found
    raise AssertionError(
        f"not every process has connections: { {pid: len(streams) for pid, streams in found.items()} }"
    )


def _holder(pids: list[int], port: int) -> int:
    for _ in range(200):
        for pid in pids:
            for connection in psutil.Process(pid).net_connections("tcp"):
                if connection.raddr and connection.raddr.port == port and connection.status == psutil.CONN_ESTABLISHED:
                    return pid
        time.sleep(0.01)  # it is in the accept queue of one of them
    raise AssertionError(f"no router has accepted the connection from port {port}")
