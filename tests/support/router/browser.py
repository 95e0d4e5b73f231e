"""Headless Chromium, driven over the WebDriver protocol, for tests that need a real browser."""

import base64
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

# The last four disable requests to its vendor's hosts, which fail on a machine without a network.
FLAGS = (
    "--headless",
    "--no-sandbox",  # root needs it
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element's id (WebDriver, section 12)


class Browser:
    """One browser with an empty profile. Entered with `with`; skips the test where no browser is installed."""

    def __init__(self, profile: Path) -> None:
        driver, chromium = shutil.which("chromedriver"), shutil.which("chromium")
        if driver is None or chromium is None:
            pytest.skip("needs chromium and chromedriver: apt-get install -y chromium chromium-driver")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._process = subprocess.Popen(
            [driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
        )
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False)
        self._session = ""
        options = {"binary": chromium, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        try:
            self._await_driver()
            self._session = self._call("POST", "", capabilities={"alwaysMatch": wanted})["sessionId"]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._session:
            self._call("DELETE", "")
        self._client.close()
        self._process.terminate()
        self._process.wait(30)

    def open(self, url: str) -> None:
        self._call("POST", "/url", url=url)

    @property
    def url(self) -> str:
        return str(self._call("GET", "/url"))

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a script returns in the page."""
        return self._call("POST", "/execute/sync", script=script, args=list(arguments))

    def until(self, script: str, seconds: float = 20) -> None:
        """Waits until an expression is true in the page; fails when it does not become so."""
        end = time.monotonic() + seconds
        while not self.run(f"return Boolean({script})"):
            assert time.monotonic() < end, f"{script}; the page shows: {self.text()}"
            time.sleep(0.05)

    def text(self) -> str:
        """The visible text of the page."""
        return str(self.run("return document.body.innerText"))

    def type(self, selector: str, text: str) -> None:
        """Types a text into an element."""
        self._call("POST", f"/element/{self._find(selector)}/value", text=text)

    def click(self, selector: str) -> None:
        self._call("POST", f"/element/{self._find(selector)}/click")

    def console_errors(self) -> list[str]:
        """Errors in the browser's console since the last call: failed scripts, blocked requests."""
        entries = self._call("POST", "/se/log", type="browser")
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("GET", "/screenshot")))

    def _find(self, selector: str) -> str:
        return str(self._call("POST", "/element", using="css selector", value=selector)[_ELEMENT])

    def _await_driver(self) -> None:
        end = time.monotonic() + 30
        while True:
            try:
                if self._client.get("/status").json()["value"]["ready"]:
                    return
            except httpx.TransportError:
                assert time.monotonic() < end, "chromedriver does not answer"
                time.sleep(0.05)

    def _call(self, method: str, path: str, **fields: Any) -> Any:
        where = f"/session/{self._session}{path}" if self._session else "/session"
        answer = self._client.request(method, where, json=fields if method == "POST" else None)
        value = answer.json()["value"]
        assert answer.status_code == 200, value
        return value
