"""Keys: who may call the API, which tenant a call belongs to, who may read metrics."""

import hashlib
import hmac
import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

import structlog
from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from headrace_base.errors import HeadraceError
from headrace_base.private_file import read_private

SALT_BYTES = 16
NAME_DIGITS = 8  # hexadecimal digits of the salt, in the name of a tenant whose key has no name
_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:]+)(?::[0-9]*)?")


log = structlog.get_logger("headrace.keys")


class KeysFileError(HeadraceError):
    """A file of keys, or a key in it, is not usable."""


class ExposureError(HeadraceError):
    """A socket would listen beyond this machine without authentication."""


class ApiKey(BaseModel):
    """One key and its tenant's name in logs. A bare string is a key that is named after its salt."""

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
            raise ValueError("a key has 8 to 512 printable ASCII characters and no spaces")
        return self


class AuthConfig(BaseModel):
    """The sources of keys. With neither `keys` nor `keys_file` the server is open, on loopback only."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    keys: tuple[ApiKey, ...] = ()
    keys_file: Path | None = Field(
        default=None,
        description="one key a line, or name:key; # starts a comment",
        json_schema_extra={"flag": "--api-keys-file", "help": "file with one API key a line, or name:key"},
    )
    allow_no_auth: bool = Field(
        default=False, description="listen beyond loopback without keys", json_schema_extra={"flag": "--allow-no-auth"}
    )
    metrics_key: ApiKey | None = Field(
        default=None, description="reads /metrics and nothing else; with one, API keys do not read it"
    )
    metrics_key_file: Path | None = Field(
        default=None,
        description="the same in a file; several, to replace one",
        json_schema_extra={
            "flag": "--metrics-key-file",
            "help": "file with a key that reads /metrics and nothing else",
        },
    )

    @property
    def has_keys(self) -> bool:
        return bool(self.keys) or self.keys_file is not None

    @property
    def has_metrics_keys(self) -> bool:
        return self.metrics_key is not None or self.metrics_key_file is not None

    def load_all(self) -> "Keys":
        """The keys of both kinds, for a start. Raises KeysFileError, PrivateFileError."""
        keys = Keys(self.load(), self.load_metrics())
        keys.check_apart()
        return keys

    def load(self, *, may_have_none: bool = False) -> tuple[ApiKey, ...]:
        """All API keys, including the file's. Raises KeysFileError, PrivateFileError."""
        if self.keys_file is None:
            return self.keys
        return self.keys + _read_keys(self.keys_file, "API keys", may_have_none=may_have_none)

    def load_metrics(self, *, may_have_none: bool = False) -> tuple[ApiKey, ...]:
        """All metrics keys, including the file's. Raises KeysFileError, PrivateFileError."""
        keys: tuple[ApiKey, ...] = () if self.metrics_key is None else (self.metrics_key,)
        if self.metrics_key_file is not None:
            keys += _read_keys(self.metrics_key_file, "metrics keys", may_have_none=may_have_none)
        return keys


@dataclass(frozen=True, slots=True)
class Keys:
    """All keys at one time."""

    api: tuple[ApiKey, ...] = ()
    metrics: tuple[ApiKey, ...] = ()

    def check_apart(self) -> None:
        """Raises KeysFileError if a key is of both kinds."""
        if {entry.key for entry in self.api} & {entry.key for entry in self.metrics}:
            raise KeysFileError("a metrics key is also an API key: create one that is valid for /metrics only")


@dataclass(frozen=True, slots=True)
class Tenant:
    """The customer that a call is made for. The salt is part of every KV block's identity; the default has none."""

    name: str
    salt: bytes


OPEN_TENANT = Tenant("default", b"")


class Authenticator:
    """Maps a bearer token to its tenant. Every key is compared, in constant time, whichever matches.

    A metrics key belongs to no tenant: it reads /metrics. Without a metrics key, API keys read /metrics. Whether keys
    are needed is decided once: nothing is open when the last one is revoked.
    """

    def __init__(self, keys: Keys, tenant_key: bytes) -> None:
        """tenant_key: at most 64 bytes, from which the tenants' salts are derived; the same for all routers."""
        self._tenant_key = tenant_key
        self.open = not keys.api  # whether calls need no key
        self._metrics_have_keys = bool(keys.metrics)
        self.use(keys)

    def use(self, keys: Keys) -> None:
        """From the next request on."""
        self._metrics = [_digest(entry.key.get_secret_value().encode()) for entry in keys.metrics]
        self._tenants: list[tuple[bytes, Tenant]] = []
        for entry in keys.api:
            raw = entry.key.get_secret_value().encode()
            salt = hashlib.blake2b(raw, key=self._tenant_key, digest_size=SALT_BYTES, person=b"tenant")
            name = entry.name or f"key-{salt.hexdigest()[:NAME_DIGITS]}"  # the same whatever keys are added or removed
            self._tenants.append((_digest(raw), Tenant(name, salt.digest())))
        if not self.open and not self._tenants:
            log.warning("no API key is left: every call that needs one is refused")

    def tenant(self, authorization: bytes | None) -> Tenant | None:
        """The caller's tenant from an Authorization header's value; None = refuse."""
        if self.open:
            return OPEN_TENANT
        digest = _digest(_bearer(authorization))
        found: Tenant | None = None
        for expected, tenant in self._tenants:
            if hmac.compare_digest(expected, digest):
                found = tenant
        return found

    def may_read_metrics(self, authorization: bytes | None) -> bool:
        """Whether an Authorization header's value allows to read /metrics."""
        if not self._metrics_have_keys:
            return self.tenant(authorization) is not None
        digest = _digest(_bearer(authorization))
        matches = [hmac.compare_digest(expected, digest) for expected in self._metrics]
        return any(matches)


def check_exposure(host: str, auth: AuthConfig) -> None:
    """Raises ExposureError if `host` is reachable from other machines and needs no key."""
    if auth.has_keys or auth.allow_no_auth or is_loopback(host):
        return
    raise ExposureError(
        f"refusing to listen on {host} without API keys: pass --api-keys-file FILE (or set HEADRACE_API_KEYS), "
        "--host 127.0.0.1, or --allow-no-auth if the network itself restricts access"
    )


def check_metrics_exposure(host: str, auth: AuthConfig, *, no_auth: bool) -> None:
    """The same for a separate address for metrics; `no_auth`: it is configured to answer without a key."""
    if auth.has_keys or auth.has_metrics_keys or auth.allow_no_auth or no_auth or is_loopback(host):
        return
    raise ExposureError(
        f"refusing to serve metrics on {host} without a key: pass --metrics-key-file, serve them on 127.0.0.1, "
        "or pass --metrics-no-auth if the network itself restricts access"
    )


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only. Names other than localhost count as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def needs_local_host(host: str, auth: AuthConfig) -> bool:
    """Whether a server that listens on `host` answers requests for names of this machine only.

    Without keys, a page of any site could otherwise call it from this machine's browser, through a name of the site
    that resolves to this machine (DNS rebinding).
    """
    return is_loopback(host) and not (auth.has_keys or auth.allow_no_auth)


def is_local_authority(value: bytes) -> bool:
    """Whether a Host header's value, with or without a port, is a loopback address or localhost."""
    match = _AUTHORITY.fullmatch(value.decode("latin-1").lower())
    return match is not None and is_loopback(match[1].removesuffix("."))


def _bearer(authorization: bytes | None) -> bytes:
    scheme, _, token = (authorization or b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


def _digest(raw: bytes) -> bytes:
    # Equal lengths on both sides, so that the comparison does not reveal a key's length.
    return hashlib.sha256(raw).digest()


def _read_keys(path: Path, what: str, *, may_have_none: bool) -> tuple[ApiKey, ...]:
    try:
        text = read_private(path, f"the file of {what}").decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise KeysFileError(f"the file of {what} {path} cannot be read: {reason}") from error
    if may_have_none and not text.strip():  # as a write that has begun, or a full disk, leaves it
        raise KeysFileError(f"the file of {what} {path} is empty: add one a line; to revoke all, add a comment alone")
    keys: list[ApiKey] = []
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if not line or line.startswith("#"):
            continue
        name, colon, key = line.partition(":")
        try:
            keys.append(ApiKey(name=name, key=SecretStr(key)) if colon else ApiKey(name="", key=SecretStr(line)))
        except ValueError as error:
            raise KeysFileError(
                f"line {number} of the file of {what} {path} is no key: write KEY or NAME:KEY, with 8 to 512 printable "
                "characters"
            ) from error
    if not (keys or may_have_none):
        raise KeysFileError(f"the file of {what} {path} holds no key: add one a line")
    return tuple(keys)
