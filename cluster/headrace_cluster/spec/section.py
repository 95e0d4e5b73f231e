"""What all sections of the spec share: strict keys, sizes and ports."""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from headrace_cluster.spec.sizes import parse_bytes


def _bytes(value: object) -> object:
    return parse_bytes(value) if isinstance(value, str) else value


Bytes = Annotated[int, BeforeValidator(_bytes, json_schema_input_type=int | str)]
Port = Annotated[int, Field(ge=0, le=65535)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
