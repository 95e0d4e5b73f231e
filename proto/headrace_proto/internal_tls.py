"""TLS between the processes of a cluster, where an operator has files for it."""

from dataclasses import dataclass

TLS_NAME = "headrace.internal"  # that the certificate of every member has, wherever it runs


@dataclass(frozen=True, slots=True)
class InternalTls:
    """Files in PEM, at the same paths on every machine of the cluster. ca: the authorities that signed `cert`."""

    cert: str
    key: str
    ca: str
