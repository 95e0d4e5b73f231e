"""API keys: who may call, and which tenant a call belongs to (RELIABILITY R3, R11)."""

import hashlib
import hmac
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from headrace_proto.errors import HeadraceError

SALT_BYTES = 16


class KeysFileError(HeadraceError):
    """The file of API keys cannot be used."""


class ExposureError(HeadraceError):
    """A socket would listen beyond this machine with nothing to guard it."""


class ApiKey(BaseModel):
    """One key and the name under which its tenant appears in logs. A bare string is a key named after its place."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    name: str = Field(default="", max_length=64, pattern=r"^[A-Za-z0-9._-]*$")
    key: SecretStr

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, value: object) -> object:
        return {"key": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _usable(self) -> "ApiKey":
        text = self.key.get_secret_value()
        if not 8 <= len(text) <= 512 or not text.isascii() or any(c.isspace() or not c.isprintable() for c in text):
            raise ValueError("an API key has 8 to 512 printable ASCII characters and no spaces")
        return self


class AuthConfig(BaseModel):
    """Where keys come from. With neither `keys` nor `keys_file` the server is open, on loopback only."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    keys: tuple[ApiKey, ...] = ()
    keys_file: Path | None = Field(default=None, description="one key a line, or name:key; # starts a comment")
    allow_no_auth: bool = Field(default=False, description="listen beyond loopback without keys")

    @property
    def has_keys(self) -> bool:
        return bool(self.keys) or self.keys_file is not None

    def load(self) -> tuple[ApiKey, ...]:
        """All keys, those of the file included. Raises KeysFileError."""
        return self.keys if self.keys_file is None else self.keys + _read_keys(self.keys_file)


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whoever a call is made for. The salt is part of every KV block's identity; the open default has none."""

    name: str
    salt: bytes


OPEN_TENANT = Tenant("default", b"")


class Authenticator:
    """Maps a bearer token to its tenant. Every key is compared, in constant time, whichever matches."""

    def __init__(self, keys: tuple[ApiKey, ...], secret: bytes) -> None:
        self._tenants: list[tuple[bytes, Tenant]] = []
        for place, entry in enumerate(keys, 1):
            raw = entry.key.get_secret_value().encode()
            salt = hashlib.blake2b(raw, key=hashlib.sha256(secret).digest(), digest_size=SALT_BYTES, person=b"tenant")
            self._tenants.append((_digest(raw), Tenant(entry.name or f"key-{place}", salt.digest())))

    @property
    def open(self) -> bool:
        """Whether calls need no key."""
        return not self._tenants

    def tenant(self, authorization: bytes | None) -> Tenant | None:
        """The caller's tenant from an Authorization header's value; None = refuse."""
        if self.open:
            return OPEN_TENANT
        scheme, _, token = (authorization or b"").partition(b" ")
        digest = _digest(token.strip() if scheme.lower() == b"bearer" else b"")
        found: Tenant | None = None
        for expected, tenant in self._tenants:
            if hmac.compare_digest(expected, digest):
                found = tenant
        return found


def check_exposure(host: str, auth: AuthConfig) -> None:
    """Raises ExposureError if `host` is reachable from other machines and no key guards it (R3)."""
    if auth.has_keys or auth.allow_no_auth or is_loopback(host):
        return
    raise ExposureError(
        f"refusing to listen on {host} without API keys: set auth.keys (or auth.keys_file), "
        "listen on 127.0.0.1, or pass --allow-no-auth if the network itself keeps strangers out"
    )


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only. Names other than localhost count as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _digest(raw: bytes) -> bytes:
    # Equal lengths on both sides, so that comparing tells nothing about a key's length.
    return hashlib.sha256(raw).digest()


def _read_keys(path: Path) -> tuple[ApiKey, ...]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise KeysFileError(f"the file of API keys {path} cannot be read: {reason}") from error
    keys: list[ApiKey] = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, colon, key = text.partition(":")
        try:
            keys.append(ApiKey(name=name, key=SecretStr(key)) if colon else ApiKey(name="", key=SecretStr(text)))
        except ValueError as error:
            raise KeysFileError(
                f"line {number} of {path} is no API key: write KEY or NAME:KEY, with 8 to 512 printable characters"
            ) from error
    if not keys:
        raise KeysFileError(f"the file of API keys {path} holds no key: add one a line")
    return tuple(keys)
