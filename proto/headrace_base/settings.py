"""Settings that several packages declare: the command-line flag on a field, and the TLS files of internal calls."""

from dataclasses import dataclass
from typing import Any

TLS_NAME = "headrace.internal"  # that the certificate of every member has, wherever it runs


@dataclass(frozen=True, slots=True)
class InternalTls:
    """Files in PEM, at the same paths on every machine of the cluster. ca: the authorities that signed `cert`."""

    cert: str
    key: str
    ca: str


def flag(name: str, *, help: str = "", values: str = "", short: str = "") -> dict[str, Any]:
    """For `json_schema_extra`. `help`: instead of the description; `values`: how its values are written."""
    given = {"flag": name, "help": help, "values": values, "short": short}
    return {key: value for key, value in given.items() if value}
