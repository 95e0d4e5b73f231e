"""`headrace serve` with TLS and client certificates, through the client commands."""

import re
from collections.abc import Callable
from pathlib import Path

from support.certificates import Authority
from support.e2e.headrace_process import SMALL, START_SECONDS, Serve


def test_serve_with_tls(start: Callable[..., Serve], eventually: Callable[..., None], tmp_path: Path) -> None:
    authority, clients = Authority(tmp_path), Authority(tmp_path, "clients")
    cert, key = authority.issue("server")
    both = tmp_path / "both.pem"
    both.touch(mode=0o600)
    both.write_bytes(b"".join(path.read_bytes() for path in clients.issue("member")))
    serve = start(*SMALL, "--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(clients.file))
    eventually(lambda: "Talk to it" in serve.stderr_text or serve.process.poll() is not None, START_SECONDS)
    shown = serve.stderr_text
    for row in ("API", "docs", "health", "metrics", "admin"):
        assert re.search(rf"^  {row} +https://127\.0\.0\.1:\d+", shown, re.MULTILINE), shown
    assert re.search(r"^  gRPC .*\(TLS; needs a client certificate\)", shown, re.MULTILINE), shown
    status = serve.run("status")
    assert "HTTP https://127.0.0.1:" in status.stdout and status.returncode == 0, status.stderr
    answer = serve.run("chat", "--once", "Hi", "--max-tokens", "4", "--client-cert", str(both))
    assert answer.stdout.strip() and answer.returncode == 0, answer.stderr
    refused = serve.run("chat", "--once", "Hi", "--max-tokens", "4")
    assert refused.returncode == 1 and "--client-cert FILE" in refused.stderr
    assert serve.run("stop").returncode == 0
    assert serve.process.wait(10) == 0 and "Traceback" not in serve.stderr_text
