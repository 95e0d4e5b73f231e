"""Which files the public addresses use for TLS."""

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from headrace_base.settings import flag


class TlsConfig(BaseModel):
    """The files, in PEM. Without them the public addresses use no TLS."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cert: Path | None = Field(
        default=None,
        description="certificate of the public addresses, followed by those of intermediate authorities (PEM)",
        json_schema_extra=flag("--tls-cert", help="certificate of the HTTP, gRPC and admin API (PEM)"),
    )
    key: Path | None = Field(
        default=None,
        description="its key, without a passphrase (PEM)",
        json_schema_extra=flag("--tls-key", help="key of --tls-cert (PEM)"),
    )
    client_ca: Path | None = Field(
        default=None,
        description="authorities of clients (PEM): HTTP and gRPC then need a client certificate, besides any API key",
        json_schema_extra=flag("--tls-client-ca", help="authorities whose client certificates HTTP and gRPC require"),
    )

    @field_validator("cert", "key", "client_ca")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        """Processes in other folders read it, too."""
        return path and path.absolute()

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise ValueError("--tls-cert and --tls-key belong together: set both, or none")
        if self.client_ca is not None and self.cert is None:
            raise ValueError("--tls-client-ca needs --tls-cert and --tls-key")
        return self

    @property
    def enabled(self) -> bool:
        return self.cert is not None

    @property
    def scheme(self) -> str:
        """The scheme of the URLs of these addresses."""
        return "https" if self.enabled else "http"
