"""What all sections of the spec share: strict keys, and the types of sizes, ports, counts, labels and JSON objects."""

import json
import re
from functools import partial
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)

_UNITS = {"": 1, "b": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?(b?)\s*", re.IGNORECASE)


def parse_bytes(value: object) -> object:
    """The bytes of '2GiB', '512M', '1.5 GB', '2Gi' or a number as text. Raises ValueError with a sentence.

    pydantic's ByteSize does not know Kubernetes' units (Ki, Mi, Gi), and ignores what follows the unit.
    """
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value)
    if match is None:
        raise ValueError("write an amount of memory like 2GiB, 512MiB or a number of bytes")
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


def parse_ports(value: object) -> object:
    """The first and the last port of '20000-20100'. Raises ValueError with a sentence."""
    if not isinstance(value, str):
        return value
    first, _, last = value.partition("-")
    if not (first.isdigit() and last.isdigit() and 0 < int(first) <= int(last) <= 65535):
        raise ValueError("write a range of ports like 20000-20100")
    return int(first), int(last)


Bytes = Annotated[int, BeforeValidator(parse_bytes, json_schema_input_type=int | str)]
PortRange = Annotated[tuple[int, int], BeforeValidator(parse_ports, json_schema_input_type=str)]
Port = Annotated[int, Field(ge=0, le=65535)]
Count = Annotated[int, Field(ge=1, le=1024)]  # number of replicas, or of ranks in one direction


class Section(BaseModel):
    """One mapping of the spec. An unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_serializer(mode="wrap")
    def _own_first(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """`config show` prints names and addresses first, and the inherited settings of ranks or routers after them."""
        data = dump(self)
        return dict(sorted(data.items(), key=lambda entry: entry[0] not in type(self).__annotations__))


def reason(entry: Any) -> str:
    """The message of one error of pydantic."""
    return str(entry["msg"]).removeprefix("Value error, ")


def json_object(value: object, example: str) -> object:
    """The mapping of a JSON text; another value as it is. Raises ValueError with the example."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise ValueError(f"write it as a JSON object, such as {example}")
    return parsed


_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_KEY = re.compile(rf"(?:[A-Za-z0-9][A-Za-z0-9.-]{{0,252}}/)?{_PART}")
_VALUE = re.compile(rf"!?(?:{_PART}|in\({_PART}(?:, ?{_PART})*\))")


def _checked(labels: dict[str, str]) -> dict[str, str]:
    """Ray's syntax of a label selector, https://docs.ray.io/en/latest/ray-core/scheduling/labels.html."""
    for key, value in labels.items():
        if not _KEY.fullmatch(key):
            raise ValueError(f"{key[:80]!r} is no name of a label, such as accelerator or example.com/pool")
        if not _VALUE.fullmatch(value):
            raise ValueError(f"{value[:80]!r} is no value of a label: write it as h100, !h100 or in(h100, h200)")
    return labels


_mapping = partial(json_object, example='{"gpu": "h100"}')
NodeLabels = Annotated[dict[str, str], BeforeValidator(_mapping), AfterValidator(_checked)]
