"""What a router needs to be a member of its cluster."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import msgspec
from cryptography import x509

from headrace_proto.errors import HeadraceError
from headrace_proto.identity import Identity
from headrace_proto.private_file import read_private, write_private


class CredentialsError(HeadraceError):
    """A file with a router's credentials cannot be used."""


class RouterCredentials(msgspec.Struct, frozen=True):
    """Secret: for a pipe to the router's process, or a private file."""

    identity: bytes  # a saved Identity
    tenant_key: bytes  # from which the tenants' salts are derived: the same for all routers

    @classmethod
    def decode(cls, encoded: bytes) -> Self:
        """Raises msgspec.MsgspecError."""
        return msgspec.msgpack.decode(encoded, type=cls)

    @classmethod
    def read(cls, path: Path) -> Self:
        """From a private file. Raises CredentialsError, PrivateFileError."""
        try:
            credentials = cls.decode(read_private(path, "the file of credentials"))
            chain = Identity.restore(credentials.identity).certificate.chain
        except OSError as error:
            raise CredentialsError(f"the credentials in {path} cannot be read: {error.strerror}") from error
        except (msgspec.MsgspecError, ValueError) as error:
            raise CredentialsError(
                f"{path} has no credentials of a router: `headrace credentials` makes them"
            ) from error
        if x509.load_pem_x509_certificate(chain.encode()).not_valid_after_utc < datetime.now(UTC):
            raise CredentialsError(f"the credentials in {path} have expired: make others with `headrace credentials`")
        return credentials

    @property
    def name(self) -> str:
        """The router's id in its cluster: the name in its certificate."""
        return Identity.restore(self.identity).name

    def write(self, path: Path) -> None:
        """To a file that only its owner can read, atomically. Raises OSError."""
        write_private(path, self.encode())

    def encode(self) -> bytes:
        """The inverse of `decode`."""
        return msgspec.msgpack.encode(self)
