"""The controller's connection to Ray, as a driver. A Ray is never discovered automatically."""

import logging
import os
import socket
import sys
import time
from collections.abc import Callable

import grpc

from headrace_base.address import port_of, split_address
from headrace_base.cluster_member import NO_PROXY
from headrace_cluster.core import naming
from headrace_cluster.errors import OpenRayError, RayStartError
from headrace_cluster.ray import private
from headrace_cluster.spec.cluster_spec import ClusterSpec

GCS_SECONDS = 20.0  # as long as Ray's own client retries: head and controller may be started together
GCS_RETRY_SECONDS = 0.5
JOIN_SECONDS = 10.0  # between two lines about a Ray that does not answer
RECONNECT_SECONDS = 86_400  # for which drivers, raylets and actors wait for another GCS; 60 by default, then they end


def join(spec: ClusterSpec) -> str:
    """Connects to the Ray at `ray.address`, whose token comes from Ray's own environment variables; its dashboard.

    Raises RayStartError, and OpenRayError if it needs no token.
    """
    address = spec.ray.address
    assert address is not None
    await_gcs(address)
    if port_of(address) and not spec.ray.no_auth:  # before it gets our token
        check_token(address)
    set_ray_environment()
    import ray

    private.disable_driver_hooks()
    try:
        context = ray.init(
            address=address,
            namespace=naming.namespace(spec.cluster),
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:
        raise RayStartError(
            f"no Ray could be joined at {address}: {first_line(error)}; check --ray-address, and that "
            "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH holds that cluster's token"
        ) from error
    if not spec.ray.no_auth:  # again: 'auto' has its address now, and a Ray that was silent before answers
        check_token(str(context.address_info["gcs_address"]))
    return f"http://{context.dashboard_url}" if context.dashboard_url else ""


def join_when_up(spec: ClusterSpec, tell: Callable[[str], None]) -> str:
    """As `join`, for as long as it takes: head and controller may be started together, and a head may be lost.

    Ray's client cannot connect twice in a process: after a failure this program is started anew, as the same process.
    """
    address = spec.ray.address
    assert address is not None
    while True:
        try:
            await_gcs(address, JOIN_SECONDS)
            break
        except RayStartError as error:
            tell(f"{error}; trying again until one does")
    try:
        return join(spec)
    except RayStartError as error:
        tell(f"{error}; trying again in {JOIN_SECONDS:g} s")
        time.sleep(JOIN_SECONDS)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def node_is_alive() -> bool:
    """Whether this process's node is still part of Ray. It blocks, and raises when the GCS does not answer."""
    import ray

    own = ray.get_runtime_context().get_node_id()
    return any(node["NodeID"] == own and node["Alive"] for node in ray.nodes())


def await_gcs(address: str, seconds: float = GCS_SECONDS) -> None:
    """Waits until something listens at 'host:port', where a Ray may be starting; 'auto' is left to Ray.

    Ray itself would wait for minutes, and log to its own files only. Raises RayStartError.
    """
    if not port_of(address):
        return
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(split_address(address), max(0.1, deadline - time.monotonic())).close()
            return
        except (OSError, ValueError, OverflowError) as error:  # ValueError: a name that is none
            if time.monotonic() + GCS_RETRY_SECONDS >= deadline:
                reason = getattr(error, "strerror", None) or str(error)
                raise RayStartError(
                    f"no Ray answers at {address} ({reason}); check --ray-address: host and port of the GCS, "
                    "6379 by default"
                ) from error
        time.sleep(GCS_RETRY_SECONDS)


def set_ray_environment() -> None:
    """Sets the environment of this process for Ray. Every process that uses Ray does so before it imports Ray."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # no statistics are sent
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Its handler replaces ours for SIGTERM, prints a stack and aborts the process three seconds later.
    os.environ["RAY_DISABLE_FAILURE_SIGNAL_HANDLER"] = "1"
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # this environment, not a new one per worker
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(RECONNECT_SECONDS))


def first_line(error: Exception) -> str:
    """The first line of the message of an error of Ray."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")[:300]


ANSWER_SECONDS = 10.0
# Reads nothing and changes nothing. An empty message is a valid request.
_METHOD = "/ray.rpc.NodeInfoGcsService/CheckAlive"
# Without an answer nothing is known: of a GCS with Ray's own TLS, or of one that ended, which joining then reports.
_NO_ANSWER = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}


def check_token(address: str) -> None:
    """address: host:port of a GCS. Raises OpenRayError if it answers a call without a token."""
    with grpc.insecure_channel(address, options=NO_PROXY) as channel:
        call = channel.unary_unary(_METHOD, request_serializer=bytes, response_deserializer=bytes)
        try:
            call(b"", timeout=ANSWER_SECONDS)
        except grpc.RpcError as error:
            if error.code() in {grpc.StatusCode.UNAUTHENTICATED, *_NO_ANSWER}:
                return
    raise OpenRayError(
        f"the Ray at {address} needs no token: any process that reaches its ports can run code on every node. Start "
        "it with RAY_AUTH_MODE=token and a token, or pass --ray-no-auth if the network itself restricts access"
    )
