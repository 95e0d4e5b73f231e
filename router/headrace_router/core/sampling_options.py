"""The options that a request may set and a model may have defaults for: names, types and ranges, declared once.

Request bodies (`bodies.py`) and the `defaults` of a model in the cluster spec are both made from this class.
"""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictInt

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
TokenCount = Annotated[StrictInt, Field(ge=1, le=2**31 - 1)]
TopK = Annotated[
    StrictInt, Field(ge=-1, le=2**31 - 1, description="0 or -1 = off"), AfterValidator(lambda k: max(k, 0))
]


class SamplingOptions(BaseModel):
    """None = not set."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    max_tokens: TokenCount | None = Field(default=None, description="of an answer; the context bounds it too")
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: TopK | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=10)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
