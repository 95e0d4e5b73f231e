"""How long a simulated replica takes for a step and for a transfer. By arithmetic, or fitted from a machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from headrace_cluster.simulator.errors import SimulationError

Seconds: TypeAlias = Annotated[float, Field(ge=0)]
Count: TypeAlias = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """Seconds of one step: the terms of production's predictor, and one that it does not know.

    The predictor is linear; attention of a long prompt is not, so that its predictions err as they do on a machine.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    name: str
    source: str  # where the numbers are from, as a sentence
    base: Annotated[float, Field(gt=0)]  # seconds of a step
    per_prefill_token: Seconds
    per_decode_sequence: Seconds
    per_kv_token: Seconds  # read by a step
    per_prefill_pair: Seconds  # pair: a prompt's token and a token that this token attends to
    kv_bytes: Count  # bytes per token
    transfer_bandwidth: Annotated[float, Field(gt=0)]  # bytes per second between two replicas
    max_num_seqs: Count = 256
    max_num_batched_tokens: Count = 8192

    def seconds(self, work: Sequence[tuple[int, int]]) -> float:
        """The seconds of a step that computes positions [start, start + count) of its rows, as (start, count)."""
        prefill = decode = kv = pairs = 0
        for start, count in work:
            kv += start + count
            if count > 1:
                prefill += count
                pairs += count * (2 * start + count) // 2
            else:
                decode += 1
        return self.of(prefill, decode, kv, pairs)

    def of(self, prefill: int, decode: int, kv: int, pairs: int) -> float:
        """The seconds of a step with so many prompt tokens, sequences that decode, KV tokens read, and pairs."""
        return (
            self.base
            + self.per_prefill_token * prefill
            + self.per_decode_sequence * decode
            + self.per_kv_token * kv
            + self.per_prefill_pair * pairs
        )

    def transfer_seconds(self, tokens: int) -> float:
        """The seconds that a transfer takes, once it begins."""
        return tokens * self.kv_bytes / self.transfer_bandwidth


# Llama-3-like shapes in bfloat16. H200: 4.8 TB/s of memory, 989 dense bf16 TFLOP/s (NVIDIA's data sheet); half of the
# arithmetic peak and 80 % of the memory peak are assumed, 1 ms of host and kernel launches per step, and 25 GB/s
# (200 Gbit/s) between replicas.
_MEMORY, _FLOPS = 0.8 * 4.8e12, 0.5 * 989e12


def _h200(name: str, parameters: float, layers: int, hidden: int, kv_heads: int, gpus: int) -> LatencyModel:
    kv_bytes = 2 * layers * kv_heads * 128 * 2
    return LatencyModel(
        name,
        f"by arithmetic: {parameters / 1e9:.0f} billion parameters in bfloat16 on {gpus} H200, 80 % of the "
        "memory's and 50 % of the arithmetic's peak",
        base=0.001 + 2 * parameters / _MEMORY / gpus,
        per_prefill_token=2 * parameters / _FLOPS / gpus,
        per_decode_sequence=2 * parameters / _FLOPS / gpus,
        per_kv_token=kv_bytes / _MEMORY / gpus,
        per_prefill_pair=4 * layers * hidden / _FLOPS / gpus,
        kv_bytes=kv_bytes,
        transfer_bandwidth=25e9 * gpus,
    )


LATENCY_MODELS = {
    model.name: model
    for model in (
        _h200("h200-8b", 8e9, 32, 4096, 8, 1),
        _h200("h200-70b", 70e9, 80, 8192, 8, 4),
    )
}


def latency_model(name: str) -> LatencyModel:
    """A known model by name, or one from a JSON file with the fields of LatencyModel. Raises SimulationError."""
    if name in LATENCY_MODELS:
        return LATENCY_MODELS[name]
    path = Path(name)
    if path.suffix != ".json":
        raise SimulationError(
            f"There is no latency model '{name}'; use {', '.join(LATENCY_MODELS)}, or name a .json file."
        )
    try:
        return TypeAdapter(LatencyModel).validate_json(path.read_bytes())
    except OSError as error:
        raise SimulationError(f"The latency model {path} cannot be read: {error}.") from None
    except ValidationError as error:
        entry = error.errors(include_url=False)[0]
        where = ".".join(map(str, entry["loc"])) or "the file"
        raise SimulationError(f"The latency model {path} cannot be used; {where}: {entry['msg'].lower()}.") from None
