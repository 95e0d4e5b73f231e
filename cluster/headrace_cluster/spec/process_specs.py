"""Sections of the spec about processes: routers, admin API, controller, health, Ray, logs."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from headrace_base.logs import LogFormat
from headrace_base.settings import InternalTls, flag
from headrace_cluster.spec.section import Bytes, Port, Section
from headrace_router.access.auth import is_loopback
from headrace_router.config import RouterSettings


class RoutersSpec(Section, RouterSettings):
    """Where clients connect."""

    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="interface of the HTTP and gRPC API",
        json_schema_extra=flag("--host"),
    )
    port: Port = Field(default=8000, description="HTTP port; 0 = any free one", json_schema_extra=flag("--port"))
    grpc_port: Port = Field(
        default=8001, description="gRPC port; 0 = any free one", json_schema_extra=flag("--grpc-port")
    )
    count: int = Field(
        default=1,
        ge=1,
        le=64,
        description="router processes that share the two ports; limits count in each",
        json_schema_extra=flag("--routers"),
    )
    metrics_port: Port | None = Field(
        default=None,
        description="an address of its own for each router's /metrics and /health: this port for the first, the next "
        "one for the next, 0 = any free ones; none = of several routers, with metrics_no_auth or with tls.client_ca, "
        "from the first above the admin port, else only `port`",
        json_schema_extra=flag(
            "--metrics-port", help="address of its own for /metrics and /health; of several routers the first's"
        ),
    )
    metrics_host: str | None = Field(
        default=None,
        min_length=1,
        description="interface of these ports; none = `host`, or 127.0.0.1 with metrics_no_auth",
        json_schema_extra=flag("--metrics-host", help="interface of --metrics-port; default: --host"),
    )
    metrics_no_auth: bool = Field(
        default=False,
        description="these ports answer without a key",
        json_schema_extra=flag(
            "--metrics-no-auth", help="no key on --metrics-port; its default host is then 127.0.0.1"
        ),
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="warning", description="lowest level of a router's lines on the terminal; its file starts at info"
    )

    @property
    def stop_seconds(self) -> float:
        """How long a router that stops may serve."""
        return self.leave_seconds + self.shutdown_seconds


class AdminSpec(Section):
    """The admin API: status, stop, and changes. Always needs a key."""

    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="interface of the admin API; beyond loopback it needs a key file, and should have TLS",
        json_schema_extra=flag("--admin-host"),
    )
    port: Port = Field(
        default=8002, description="port of the admin API; 0 = any free port", json_schema_extra=flag("--admin-port")
    )
    key_file: Path | None = Field(
        default=None,
        description="file with a key for operators elsewhere: 16 characters or more; a second line is valid, too",
        json_schema_extra=flag("--admin-key-file"),
    )

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if self.key_file is None and not is_loopback(self.host):
            raise ValueError(f"admin.host {self.host} is open to others: give their key with admin.key_file")
        return self


class ControlSpec(Section):
    """The controller's gRPC, for routers, and the secret of the cluster, which goes with every internal call."""

    host: str | None = Field(
        default=None,
        min_length=1,
        description="interface of the controller, for routers; default: loopback, or its address in a Ray that runs",
        json_schema_extra=flag("--control-host"),
    )
    port: Port | None = Field(
        default=None,
        description="default: 8004, with `serve` any free port; 0 = any free port",
        json_schema_extra=flag(
            "--control-port", help="port of the controller; 0 = any free port [default: 8004; with `serve` any]"
        ),
    )
    metrics_port: Port | None = Field(
        default=None, description="of the controller's /health and /metrics, on `host`; none = there are none"
    )
    metrics_key_file: Path | None = Field(
        default=None, description="a key for /metrics: a line of 16 characters or more; a second line is valid, too"
    )
    secret_file: Path | None = Field(
        default=None,
        description="file with the cluster's secret: 16 characters or more; a second line stays valid, too",
        json_schema_extra=flag("--secret-file"),
    )

    @model_validator(mode="after")
    def _guarded(self) -> Self:
        if self.metrics_port is not None and self.metrics_key_file is None and not is_loopback(self.host or ""):
            raise ValueError("control.metrics_port is open to others: give a key with control.metrics_key_file")
        return self


class InternalTlsSpec(Section):
    """Files in PEM, at the same paths on every machine; the certificate has the name headrace.internal."""

    cert: Path
    key: Path
    ca: Path = Field(description="authorities that have signed the certificates of all processes")


class InternalSpec(Section):
    """The gRPC between controller, routers and replicas. Without TLS their network is to be private."""

    tls: InternalTlsSpec | None = None

    @property
    def tls_files(self) -> InternalTls | None:
        """For the processes that use them."""
        return None if self.tls is None else InternalTls(str(self.tls.cert), str(self.tls.key), str(self.tls.ca))


class HealthSpec(Section):
    """When the controller treats a replica as failed. Times are seconds."""

    start_seconds: float = Field(default=1800, gt=0, description="for a replica to load, warm up and be ready")
    interval_seconds: float = Field(default=0.5, gt=0, le=5, description="between two health messages")
    silence_seconds: float = Field(default=2, gt=0, description="without a health message until a replica is unhealthy")
    replace_seconds: float = Field(default=15, gt=0, description="that a replica is unhealthy before it is replaced")
    stops_per_minute: int = Field(
        default=2, ge=1, description="replicas that are stopped for their health within a minute, at most"
    )
    drain_seconds: float = Field(default=5, ge=0, description="for requests in flight when a replica is stopped")


class RaySpec(Section):
    """The Ray cluster: `serve` starts one on this machine, `headrace controller` joins the one at `address`."""

    address: str | None = Field(
        default=None,
        description="host:port of a running Ray to join, or 'auto'; of `headrace controller` alone",
        json_schema_extra=flag("--ray-address", help="Ray to join (host:port, or auto), instead of starting one"),
    )
    no_auth: bool = Field(
        default=False,
        description="join a Ray that needs no token",
        json_schema_extra=flag("--ray-no-auth", help="join a Ray without a token: all who reach it can run code"),
    )
    object_store_memory: Bytes = Field(default=100 << 20, ge=80 << 20, description="of a Ray that is started here")
    dashboard: bool = True
    dashboard_port: Port | None = Field(default=None, description="none = 8265, or the next that is free")


class LogsSpec(Section):
    """Log format and detail. Each process has a file in HEADRACE_HOME/logs (see `headrace logs --path`)."""

    format: LogFormat = Field(
        default="text",
        description="format of the log files, and of every line on stderr",
        json_schema_extra=flag("--log-format"),
    )
    files: bool = Field(
        default=True,
        description="off, for `headrace controller`: its lines are on stderr alone, those of ranks in Ray's own logs",
    )
    verbose: bool = Field(
        default=False,
        description="show at start what each replica chose for itself",
        json_schema_extra=flag("--verbose", short="-v"),
    )
