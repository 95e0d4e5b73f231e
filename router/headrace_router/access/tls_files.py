"""TLS of the public addresses: certificate, key and client authority from files, read again when they change."""

import datetime
import os
import ssl
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
from cryptography import x509

from headrace_base.cluster_member import reloading_credentials
from headrace_base.errors import HeadraceError
from headrace_base.private_file import read_private
from headrace_router.access.tls_config import TlsConfig
from headrace_router.access.watched_files import WatchedFiles

CLOCK_DIFFERENCE = datetime.timedelta(minutes=5)


class TlsFileError(HeadraceError):
    """A file of TLS cannot be used; the sentence has the reason."""


@dataclass(frozen=True, slots=True)
class LoadedTlsFiles:
    """What the files held at one time, for both kinds of server."""

    context: ssl.SSLContext
    monitoring_context: ssl.SSLContext  # clients need no certificate
    grpc: grpc.ServerCertificateConfiguration
    certificate: x509.Certificate  # the server's own
    authorities: list[x509.Certificate]  # authorities for clients' certificates


class TlsFiles(WatchedFiles[LoadedTlsFiles]):
    """What servers use for TLS; open connections keep the state in which they began."""

    def __init__(self, config: TlsConfig) -> None:
        """config: with files. Raises TlsFileError, PrivateFileError."""
        self._require_client = config.client_ca is not None
        paths = (config.cert, config.key, config.client_ca)
        super().__init__("TLS files", paths, lambda: load_tls_files(config), partial(check_tls_files, config))
        self.context, self.monitoring_context = self.current.context, self.current.monitoring_context
        self.context.sni_callback = lambda tls, _name, _context: self._use(tls, self.current.context)
        self.monitoring_context.sni_callback = lambda tls, _name, _context: self._use(
            tls, self.current.monitoring_context
        )

    @staticmethod
    def _use(handshake: ssl.SSLObject | ssl.SSLSocket, newest: ssl.SSLContext) -> None:
        """A server keeps one context: OpenSSL asks here in each handshake, with a server name or without."""
        handshake.context = newest

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """The credentials of a gRPC server."""
        return reloading_credentials(
            lambda: self.current, lambda loaded: loaded.grpc, require_client=self._require_client
        )


def load_tls_files(config: TlsConfig) -> LoadedTlsFiles:
    """The files as they are now: their owners and modes, PEM, dates, and that key and certificate are a pair.

    Raises TlsFileError, PrivateFileError.
    """
    cert = _read(config.cert, "the TLS certificate", secret=False)
    if b"PRIVATE KEY" in cert and b"CERTIFICATE" not in cert:
        raise TlsFileError(f"the TLS certificate {config.cert} is a key: are --tls-cert and --tls-key swapped?")
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
        # No session is resumed: a resumed one skips the check of its client's certificate, whose authority may be gone.
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0
    served = grpc.ssl_server_certificate_configuration([(key, cert)], authorities or None)
    certificates = _parse(cert, f"the TLS certificate {config.cert}")
    parsed = _parse(authorities, f"the authorities of TLS clients {config.client_ca}") if authorities else []
    return LoadedTlsFiles(context, monitoring, served, certificates[0], parsed)


def check_tls_files(config: TlsConfig, loaded: LoadedTlsFiles) -> None:
    """Whether clients can connect with what was loaded. Raises TlsFileError.

    Checked at the start of a cluster and when the files change; a process that is restarted uses what there is.
    """
    first, now = loaded.certificate, datetime.datetime.now(datetime.UTC)
    if now >= first.not_valid_after_utc:
        raise TlsFileError(
            f"the TLS certificate {config.cert} has expired on {first.not_valid_after_utc:%Y-%m-%d %H:%M} UTC: renew it"
        )
    if now < first.not_valid_before_utc - CLOCK_DIFFERENCE:
        raise TlsFileError(
            f"the TLS certificate {config.cert} is valid from {first.not_valid_before_utc:%Y-%m-%d %H:%M} UTC on; this "
            f"machine's clock shows {now:%Y-%m-%d %H:%M}"
        )
    if loaded.authorities and not any(map(_may_sign, loaded.authorities)):
        raise TlsFileError(
            f"the certificates in {config.client_ca} are no authorities, so that no client could connect: the file "
            "must have the certificate that signed those of the clients"
        )


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


def _may_sign(certificate: x509.Certificate) -> bool:
    """Whether it is of an authority. Certificates of version 1 do not say."""
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return certificate.version is x509.Version.v1
    except ValueError:  # OpenSSL, which verifies clients, reads some extensions that this parser refuses
        return True


def _parse(content: bytes, what: str) -> list[x509.Certificate]:
    """At least one. This parser is stricter than OpenSSL, which has accepted the content."""
    try:
        return x509.load_pem_x509_certificates(content)
    except ValueError as error:
        raise TlsFileError(
            f"{what} cannot be used: every certificate in it must be in PEM that begins with BEGIN CERTIFICATE "
            "(openssl x509 -in FILE)"
        ) from error


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
