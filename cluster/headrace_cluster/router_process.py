"""The router as a child process: config through a pipe, own session, dies with its parent."""

import contextlib
import json
import os
import subprocess
import sys
import time

from pydantic import SecretBytes, SecretStr

from headrace_cluster.errors import RouterFailedError
from headrace_cluster.spec import ClusterSpec
from headrace_router.config import RouterConfig

RESTART_SECONDS = (0.2, 1.0, 2.0, 5.0)  # before the next try, the last for all that follow
STABLE_SECONDS = 60.0
EXIT_CONFIG = 2


def router_config(spec: ClusterSpec, controller: str, secret: bytes) -> RouterConfig:
    """A router's own config, as the cluster spec has it."""
    routers = spec.routers
    return RouterConfig(
        host=routers.host,
        port=routers.port,
        grpc_port=routers.grpc_port,
        controller=controller,
        secret=SecretBytes(secret),
        auth=spec.auth,
        limits=spec.limits,
        policy=routers.policy,
        migration_limit=routers.migration_limit,
        disaggregation=routers.disaggregation,
        rebalancing=routers.rebalancing,
        keep_alive_seconds=routers.keep_alive_seconds,
        shutdown_seconds=routers.shutdown_seconds,
        log_level=routers.log_level,
    )


def encode_config(config: RouterConfig) -> str:
    """JSON with the secrets in clear text: for a pipe, never for a log, a file or a command line."""
    data = config.model_dump(mode="json")
    data["secret"] = config.secret.get_secret_value().decode("latin-1")
    data["auth"]["keys"] = [{"name": key.name, "key": key.key.get_secret_value()} for key in config.auth.keys]
    return json.dumps(data)


def decode_config(text: str) -> RouterConfig:
    """The other end of `encode_config`."""
    data = json.loads(text)
    data["secret"] = SecretBytes(data["secret"].encode("latin-1"))
    for key in data["auth"]["keys"]:
        key["key"] = SecretStr(key["key"])
    return RouterConfig.model_validate(data)


class RouterProcess:
    """One router under supervision. Not thread-safe; create it in the main thread, with which it dies."""

    def __init__(self, config: RouterConfig, called: str = "the router") -> None:
        self._config = config
        self._called = called
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._restart_at: float | None = None
        self._failures = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Starts the process; that it serves shows at the controller."""
        # The same interpreter and environment; a session of its own keeps the terminal's Ctrl-C away from it.
        command = [sys.executable, "-m", "headrace_cluster", "router", "--config-stdin", "--parent", str(os.getpid())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(encode_config(self._config).encode())
        self._started_at = time.monotonic()
        self._restart_at = None

    def keep_ports(self, http: int, grpc: int, metrics: int | None = None) -> None:
        """Ports that it was given by the system: started again, it listens where clients know it."""
        self._config = self._config.model_copy(update={"port": http, "grpc_port": grpc, "metrics_port": metrics})

    def watch(self, *, may_restart: bool) -> str:
        """Starts it again after it died; returns a sentence when that was just noticed, else an empty string.

        Raises RouterFailedError if it ended although nobody told it to and it may not be started again: it never
        served, or its config is wrong.
        """
        now = time.monotonic()
        if self._restart_at is not None:
            if now >= self._restart_at:
                self.start()
            return ""
        code = self._process.poll() if self._process is not None else None
        if code is None:
            return ""
        how = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
        if not may_restart or code == EXIT_CONFIG:
            raise RouterFailedError(f"{self._called} ended ({how}); what it said is above")
        if now - self._started_at > STABLE_SECONDS:
            self._failures = 0
        delay = RESTART_SECONDS[min(self._failures, len(RESTART_SECONDS) - 1)]
        self._failures += 1
        self._restart_at = now + delay
        return f"{self._called} ended ({how}); starting it again in {delay:g} s"

    def terminate(self) -> None:
        """Tells it to stop in order, and does not wait."""
        self._restart_at = None
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def await_end(self) -> None:
        """After `terminate`: requests in flight finish within the router's own limit, then it is ended."""
        if self._process is None:
            return
        try:
            self._process.wait(self._config.shutdown_seconds + 3)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        """Both: tells it, and waits."""
        self.terminate()
        self.await_end()

    def kill(self) -> None:
        """Ends it now."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
