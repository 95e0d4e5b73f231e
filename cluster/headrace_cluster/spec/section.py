"""What all sections of the spec share: strict keys, and the types of sizes, ports and counts."""

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

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
Count = Annotated[int, Field(ge=1, le=1024)]  # of replicas, or of ranks in one direction


class Section(BaseModel):
    """One mapping of the spec. An unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_serializer(mode="wrap")
    def _own_first(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """`config show` prints names and addresses first, and the inherited settings of ranks or routers after them."""
        data = dump(self)
        own = type(self).__annotations__
        return {name: data[name] for name in sorted(data, key=lambda name: name not in own)}
