"""The sampling options that a request may set and a model may have defaults for, declared once.

Made from this class, by field name: request bodies (`validation/bodies.py`), the `defaults` of a model in the cluster
spec, and what a replica receives (`dispatch/prepare.py`). The messages Sampling, GenerationDefaults and GenerateOptions
have fields of the same names.
"""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StrictInt

from headrace_proto.replica_pb2 import ModelFacts


def whole(value: Any) -> Any:
    """5.0 as 5: clients in JavaScript and some serializers write whole numbers so. Other values unchanged."""
    return int(value) if type(value) is float and value.is_integer() else value


Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
WHOLE = BeforeValidator(whole)  # after the range, which the schema would not show otherwise
TokenCount = Annotated[StrictInt, Field(ge=1, le=2**31 - 1), WHOLE]
TopK = Annotated[
    StrictInt, Field(ge=-1, le=2**31 - 1, description="0 or -1 = off"), AfterValidator(lambda k: max(k, 0)), WHOLE
]


@dataclass(frozen=True, slots=True)
class ApiDefault:
    """The value of an option that neither the request nor the model sets."""

    value: float


class SamplingOptions(BaseModel):
    """None = not set."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    # Without an ApiDefault: the API's default length depends on the endpoint and on the prompt.
    max_tokens: TokenCount | None = Field(default=None, description="of an answer; the context bounds it too")
    temperature: Annotated[Annotated[Number, Field(ge=0, le=2)] | None, ApiDefault(1)] = None
    top_p: Annotated[Annotated[Number, Field(ge=0, le=1, description="0 = greedy")] | None, ApiDefault(1)] = None
    top_k: Annotated[TopK | None, ApiDefault(0)] = None
    min_p: Annotated[Annotated[Number, Field(ge=0, le=1)] | None, ApiDefault(0)] = None
    repetition_penalty: Annotated[Annotated[Number, Field(gt=0, le=10)] | None, ApiDefault(1)] = None
    presence_penalty: Annotated[Annotated[Number, Field(ge=-2, le=2)] | None, ApiDefault(0)] = None
    frequency_penalty: Annotated[Annotated[Number, Field(ge=-2, le=2)] | None, ApiDefault(0)] = None


API_DEFAULTS: dict[str, float] = {
    name: entry.value
    for name, field in SamplingOptions.model_fields.items()
    for entry in field.metadata
    if isinstance(entry, ApiDefault)
}


def default_options(facts: ModelFacts) -> dict[str, float]:
    """A model's own defaults, by option."""
    return {field.name: value for field, value in facts.defaults.ListFields()}
