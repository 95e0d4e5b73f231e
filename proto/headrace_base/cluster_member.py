"""How members of a cluster recognise each other: its secret goes with every call; TLS where files are given."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from hmac import compare_digest
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import grpc
from blake3 import blake3

from headrace_base.errors import HeadraceError
from headrace_base.private_file import read_private
from headrace_base.settings import TLS_NAME, InternalTls

T = TypeVar("T")


def reloading_credentials(
    current: Callable[[], T], configure: Callable[[T], grpc.ServerCertificateConfiguration], *, require_client: bool
) -> grpc.ServerCredentials:
    """Each handshake uses what `current` returns then; open connections are not affected.

    current: returns the same object until it changes. gRPC calls it in each handshake, in a thread of its own:
    unauthenticated peers can cause it, so it is cheap. require_client: whether clients need a certificate.
    """
    used = current()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        if used is (found := current()):
            return None
        used = found
        return configure(found)

    return grpc.dynamic_ssl_server_credentials(configure(used), changed, require_client)  # type: ignore[arg-type]  # None too


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
# Options of a channel between processes of a cluster.
CLIENT: Options = (*NO_PROXY, *OWN_CONNECTION)
# A peer that ended without closing its connection (its machine lost power) is detected after the sum of these.
PING_SECONDS = 10
WATCH_REPLY_SECONDS = 5  # limit for a stream on which only the server sends: the client opens another stream
PAUSE_SECONDS = 30  # limit for a client, which may be paused and keeps its streams: routers wait as long for a replica


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


def unauthenticated_handler(sentence: str) -> Any:
    """A handler that aborts every call with UNAUTHENTICATED, of any kind of method: it waits for no request."""

    async def refuse(_requests: Any, context: Any) -> AsyncIterator[None]:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, sentence)
        yield None

    return grpc.stream_stream_rpc_method_handler(refuse)


MIN_BYTES = 16
MAX_SECRETS = 2
WATCH_SECONDS = 2.0  # between two looks at the secret file
_KEY = "headrace-secret-bin"
_CONTEXT = "headrace 2026 "


class SecretFileError(HeadraceError):
    """The file with the cluster's secret cannot be used."""


class InternalTlsError(HeadraceError):
    """A file of internal.tls cannot be used."""


class ClusterSecret:
    """The secret of a cluster; while it is replaced, the new value and then the old one. Any thread may use it."""

    def __init__(self, values: Sequence[bytes]) -> None:
        self.values = tuple(values)

    @property
    def metadata(self) -> tuple[tuple[str, bytes], ...]:
        """The metadata of a call. Both values: members that know only the old or only the new value accept the call."""
        return tuple((_KEY, value) for value in self.values)

    def accepts(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Whether a call with this metadata is of a member."""
        sent = [value for key, value in metadata if key == _KEY and isinstance(value, bytes)]
        return any([compare_digest(each, value) for each in sent[:MAX_SECRETS] for value in self.values])

    def derive(self, purpose: str) -> bytes:
        """32 bytes that all members of the cluster derive for this purpose; of the newest value."""
        return blake3(self.values[0], derive_key_context=_CONTEXT + purpose).digest()

    @property
    def fingerprints(self) -> tuple[bytes, ...]:
        """16 bytes of each value, which do not reveal it."""
        return tuple(blake3(value, derive_key_context=_CONTEXT + "fingerprint").digest(16) for value in self.values)


class SecretFile:
    """An operator's file with a value on the first line, and on the second one that stays valid for a while."""

    def __init__(self, path: Path, what: str = "the secret file") -> None:
        """what: the file in errors. Raises SecretFileError, PrivateFileError."""
        self._path = path
        self._what = what
        self.secret = ClusterSecret(_read(path, what))

    def reread(self) -> bool:
        """Whether the file has other values than before, which `secret` has then. Raises as the constructor."""
        found = _read(self._path, self._what)
        changed, self.secret.values = found != self.secret.values, found
        return changed

    async def watch(self, changed: Callable[[], None], warn: Callable[[str], object]) -> NoReturn:
        """Rereads the file for ever; a file that cannot be used changes nothing, and `warn` gets why, once."""
        shown = ""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            problem = ""
            try:
                if await asyncio.to_thread(self.reread):
                    changed()
            except HeadraceError as error:
                problem = f"{error}; what it had before stays valid"
            if problem and problem != shown:
                warn(problem)
            shown = problem


def _read(path: Path, what: str) -> tuple[bytes, ...]:
    try:
        lines = [stripped for line in read_private(path, what).split(b"\n") if (stripped := line.strip())]
    except OSError as error:
        raise SecretFileError(f"{what} {path} cannot be read: {error.strerror}") from error
    if not 1 <= len(lines) <= MAX_SECRETS:
        raise SecretFileError(
            f"{what} {path} has {len(lines)} lines: put the value on the first, and one that stays valid "
            "for a while on the second"
        )
    if min(map(len, lines)) < MIN_BYTES:
        raise SecretFileError(f"a line of {what} {path} is too short: put {MIN_BYTES} bytes or more on each")
    return tuple(lines)


class ClusterMember:
    """One process as a member of its cluster: its channels to others, and its server's port."""

    def __init__(self, secret: ClusterSecret, tls: InternalTls | None = None) -> None:
        self.secret = secret
        self._tls = tls

    @property
    def metadata(self) -> Any:
        """The metadata of every call."""
        return self.secret.metadata

    def channel(self, address: str, options: Sequence[tuple[str, Any]] = ()) -> grpc.aio.Channel:
        """To another member. Raises InternalTlsError when a file of TLS cannot be read."""
        if self._tls is None:
            return grpc.aio.insecure_channel(address, options=options)
        key, cert, ca = _read_files(self._tls)
        credentials = grpc.ssl_channel_credentials(ca, key, cert)
        named = (*options, ("grpc.ssl_target_name_override", TLS_NAME))
        return grpc.aio.secure_channel(address, credentials, options=named)

    def server(self, options: Sequence[tuple[str, Any]]) -> grpc.aio.Server:
        """It runs calls of members only."""
        return grpc.aio.server(interceptors=[_Guard(self.secret)], options=options)

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """The port; 0, or a RuntimeError, if it cannot listen. Raises InternalTlsError."""
        if self._tls is None:
            return server.add_insecure_port(address)
        tls = self._tls

        def configure(files: tuple[bytes, bytes, bytes]) -> grpc.ServerCertificateConfiguration:
            key, cert, ca = files
            return grpc.ssl_server_certificate_configuration([(key, cert)], ca)

        files = _Reread(tls)
        return server.add_secure_port(address, reloading_credentials(files.current, configure, require_client=True))


class _Reread:
    """The files of TLS, read again by each handshake; what was read before while one of them cannot be read."""

    def __init__(self, tls: InternalTls) -> None:
        self._tls = tls
        self._files = _read_files(tls)

    def current(self) -> tuple[bytes, bytes, bytes]:
        try:
            found = _read_files(self._tls)
        except InternalTlsError:
            return self._files
        if found != self._files:
            self._files = found
        return self._files


def _read_files(tls: InternalTls) -> tuple[bytes, bytes, bytes]:
    """Key, certificate and authorities. Raises InternalTlsError, PrivateFileError."""
    try:
        key = read_private(Path(tls.key), "the key of internal.tls")
        return key, Path(tls.cert).read_bytes(), Path(tls.ca).read_bytes()
    except OSError as error:
        raise InternalTlsError(f"{error.filename} of internal.tls cannot be read: {error.strerror}") from error


class _Guard(grpc.aio.ServerInterceptor):
    def __init__(self, secret: ClusterSecret) -> None:
        self._secret = secret

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        if self._secret.accepts(handler_call_details.invocation_metadata):
            return await continuation(handler_call_details)
        return _REFUSAL


_REFUSAL = unauthenticated_handler("the cluster's secret is missing or another one: use the same --secret-file")
