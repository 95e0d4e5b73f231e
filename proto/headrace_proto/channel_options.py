"""gRPC options of internal connections: one declaration for the processes of a cluster."""

Options = tuple[tuple[str, int], ...]

MAX_MESSAGE_BYTES = 64 << 20
LARGE_MESSAGES: Options = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)
# Addresses of a cluster are internal: a proxy that the environment names must not receive these calls.
NO_PROXY: Options = (("grpc.enable_http_proxy", 0),)
# A channel that shared its connection with others would share the wait between their attempts to connect.
OWN_CONNECTION: Options = (("grpc.use_local_subchannel_pool", 1),)
# A peer without a certificate has a connection for the time of a handshake. A replica needs one per router, and a few.
MAX_CONNECTIONS = 4096
MAX_STREAMS = 32  # calls of one connection at a time; a peer has a few, further ones wait in its process
# Of a channel between processes of a cluster.
CLIENT: Options = (*NO_PROXY, *OWN_CONNECTION)
# A peer that ended without closing its connection (its machine lost power) is detected after the sum of these.
PING_SECONDS = 10
WATCH_REPLY_SECONDS = 5  # of a stream on which only the server sends: the client opens another one
PAUSE_SECONDS = 30  # of a client, which may be paused and keeps its streams: routers wait as long for a replica


def _keepalive(reply_seconds: int) -> Options:
    return (
        ("grpc.keepalive_time_ms", PING_SECONDS * 1000),
        ("grpc.keepalive_timeout_ms", reply_seconds * 1000),
        ("grpc.http2.ping_timeout_ms", reply_seconds * 1000),  # the one that ends a ping; one minute by default
    )


_PINGS_WITHOUT_DATA: Options = (("grpc.http2.max_pings_without_data", 0),)  # no bound
WATCHER: Options = (*CLIENT, *_keepalive(WATCH_REPLY_SECONDS), *_PINGS_WITHOUT_DATA)
PATIENT: Options = (*CLIENT, *_keepalive(PAUSE_SECONDS), *_PINGS_WITHOUT_DATA)  # the server may be paused
SERVER: Options = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.server_handshake_timeout_ms", 5_000),
    *_keepalive(PAUSE_SECONDS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)
