"""TLS of the public addresses: certificate, key and client authority from files, read again when they change."""

import asyncio
import os
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog

from headrace_proto.errors import HeadraceError
from headrace_proto.private_file import read_private
from headrace_proto.reloading_credentials import reloading_credentials
from headrace_router.access.tls_config import TlsConfig

RELOAD_SECONDS = 1.0  # between two looks at the files

log = structlog.get_logger("headrace.tls")


class TlsFileError(HeadraceError):
    """A file of TLS cannot be used; the sentence has the reason."""


@dataclass(frozen=True, slots=True)
class LoadedTlsFiles:
    """What the files held at one time, for both kinds of server."""

    context: ssl.SSLContext
    monitoring_context: ssl.SSLContext
    grpc: grpc.ServerCertificateConfiguration


class TlsFiles:
    """What servers use for TLS. `watch` replaces it when the files change; open connections keep the earlier state."""

    def __init__(self, config: TlsConfig) -> None:
        """config: with files. Raises TlsFileError, PrivateFileError."""
        self._config = config
        self._seen = self._refused = self._version()
        self._loaded = load_tls_files(config)

    def context(self) -> ssl.SSLContext:
        """For the next handshake."""
        return self._loaded.context

    def monitoring_context(self) -> ssl.SSLContext:
        """As `context`; clients need no certificate."""
        return self._loaded.monitoring_context

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Of a gRPC server."""
        require = self._config.client_ca is not None
        return reloading_credentials(lambda: self._loaded, lambda loaded: loaded.grpc, require_client=require)

    async def watch(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(RELOAD_SECONDS)
            self.refresh()

    def refresh(self) -> None:
        """Reads the files if they changed. What cannot be used is logged, and what was loaded before stays in use."""
        version = self._version()
        if version == self._seen:
            return
        try:
            self._loaded = load_tls_files(self._config)
        except (HeadraceError, OSError) as error:  # it is tried again: the cause may be a lack of descriptors
            if version != self._refused:
                log.warning(f"the TLS files changed and are not used: {error}; the earlier ones stay in use")
            self._refused = version
        else:
            self._seen = version
            log.info("the TLS files changed and are in use")

    def _version(self) -> tuple[tuple[int, ...], ...]:
        return tuple(map(_file_version, (self._config.cert, self._config.key, self._config.client_ca)))


def load_tls_files(config: TlsConfig) -> LoadedTlsFiles:
    """The files as they are now: their owners and modes, PEM, and that key and certificate are a pair.

    Raises TlsFileError, PrivateFileError.
    """
    cert = _read(config.cert, "the TLS certificate", secret=False)
    key = _read(config.key, "the TLS key", secret=True)
    authorities = _read(config.client_ca, "the authorities of TLS clients", secret=False)
    context = monitoring = _context(config, cert, key)
    if config.client_ca is not None:
        context = _context(config, cert, key)
        try:
            context.load_verify_locations(cadata=authorities.decode("ascii"))
        except (ssl.SSLError, UnicodeDecodeError, ValueError) as error:
            raise TlsFileError(
                f"the authorities of TLS clients {config.client_ca} are no certificates in PEM"
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
    served = grpc.ssl_server_certificate_configuration([(key, cert)], authorities or None)
    return LoadedTlsFiles(context, monitoring, served)


def _context(config: TlsConfig, cert: bytes, key: bytes) -> ssl.SSLContext:
    """Requires no client certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION  # a client could cause one handshake after the other
    context.set_alpn_protocols(["http/1.1"])
    try:
        _load_pair(context, cert, key)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise TlsFileError(f"the TLS key {config.key} is not that of the certificate {config.cert}") from error
        raise TlsFileError(
            f"the TLS certificate {config.cert} and its key {config.key} cannot be used ({error.reason or 'no PEM'}): "
            "both must be PEM, the server's certificate first"
        ) from error
    return context


def _load_pair(context: ssl.SSLContext, cert: bytes, key: bytes) -> None:
    """From memory: both kinds of server get the bytes that were checked, and ssl reads files only."""

    def refuse() -> str:
        raise TlsFileError("the TLS key has a passphrase: write it without (openssl pkey -in KEY -out FILE), mode 600")

    descriptor = os.memfd_create("tls", os.MFD_CLOEXEC)
    with os.fdopen(descriptor, "wb") as file:
        file.write(cert + b"\n" + key)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{descriptor}", password=refuse)


def _read(path: Path | None, what: str, *, secret: bool) -> bytes:
    if path is None:
        return b""
    try:
        return read_private(path, what, secret=secret)
    except OSError as error:
        raise TlsFileError(f"{what} {path} cannot be read: {error.strerror}") from error


def _file_version(path: Path | None) -> tuple[int, ...]:
    """Changes with the file, and with the file that a link names; empty without one."""
    if path is None:
        return ()
    try:
        status = path.stat()
    except OSError:
        return ()
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
