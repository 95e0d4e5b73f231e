"""The least time that a device needs for the bytes and products of a piece of work, by its measured ceilings.

The bytes are those that must be read: the weights without the input embedding, of which a step reads one row per token
(a tied one is read as the output head), of experts those that are expected to be chosen; the keys and values of the
context; and recurrent states, which are written, too.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this device reaches: bytes read and written per second, operations per second."""

    bytes_s: float
    flop_s: float

    def seconds(self, cost: "Cost") -> float:
        """Of the slower one of both; they may overlap entirely."""
        return max(cost.bytes / self.bytes_s, cost.flop / self.flop_s)


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes to move, operations (a multiply-add is two) to compute."""

    bytes: float = 0.0
    flop: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.bytes + other.bytes, self.flop + other.flop)


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What the cost of a step depends on; bytes and counts of one rank."""

    read_bytes: int  # of weights, by each step
    weights: int  # numbers, of all layers and the head; half of those whose products are of 8 bits: at twice the rate
    head_weights: int
    kv_token_bytes: int  # keys and values of one token, all layers
    attention_flop: int  # of one query over one key, all layers and heads
    state_bytes: int = 0  # of one sequence, all layers with recurrent state
    expert_bytes: int = 0  # of the weights: all routed experts
    unchosen: float = 1.0  # part of the routed experts that a token does not choose

    @classmethod
    def of(cls, model: Any) -> "ModelSizes":
        """Of a `LoadedModel`."""
        config, layout = model.config.get_text_config(), model.layout
        embedding = model.module.get_input_embeddings().weight
        read = model.weight_bytes - (0 if config.tie_word_embeddings else embedding.nbytes)
        attending = sum(len(group.layers) for group in layout.groups)
        heads, group = config.num_attention_heads, layout.groups[0]
        value_dim = group.value_dim or (config.kv_lora_rank if group.value_dim == 0 else group.head_dim)
        named = dict(model.module.named_parameters())
        routed = sum(weight.nbytes for name, weight in named.items() if ".experts." in name)
        parts = list(model.module.modules())
        coded = sum(part.scaled.codes.numel() for part in parts if hasattr(part, "scaled"))
        twice_as_fast = coded // 2  # products of 8 bits
        few_bits = [part.few_bits for part in parts if hasattr(part, "few_bits")]
        coded_bytes = coded + sum(weight.nbytes for weight in few_bits)
        coded += sum(weight.outputs * weight.inputs for weight in few_bits)
        experts = getattr(config, "n_routed_experts", None) or getattr(config, "num_experts", None) or 1
        return cls(
            read_bytes=read,
            weights=(read - coded_bytes) // embedding.element_size() + coded - twice_as_fast,
            head_weights=embedding.numel(),
            kv_token_bytes=layout.block_bytes // layout.block_size * len(layout.groups),
            attention_flop=2 * heads * (group.head_dim + value_dim) * attending,
            state_bytes=layout.state_bytes,
            expert_bytes=routed,
            unchosen=1 - config.num_experts_per_tok / experts if routed else 1.0,
        )

    def chosen(self, tokens: int) -> float:
        """Bytes of weights that a step of so many tokens reads."""
        return self.read_bytes - self.expert_bytes * self.unchosen**tokens

    @property
    def active(self) -> float:
        """Weights that a token is multiplied with."""
        return self.weights * (1 - self.expert_bytes * self.unchosen / max(1, self.read_bytes))

    def decode(self, contexts: Sequence[float]) -> Cost:
        """One step that computes one token of each sequence, with its tokens of context."""
        total, count = sum(contexts), len(contexts)
        read = self.chosen(count) + (total + count) * self.kv_token_bytes + 2 * count * self.state_bytes
        return Cost(read, 2 * self.active * count + total * self.attention_flop)

    def prefill(self, tokens: int) -> Cost:
        """A prompt in one step, to its first token."""
        flop = 2 * (self.active - self.head_weights) * tokens + 2 * self.head_weights
        return Cost(self.chosen(tokens) + tokens * self.kv_token_bytes, flop + self.attention_flop * tokens**2 / 2)

    def workload(self, lengths: Sequence[tuple[int, int]]) -> Cost:
        """Requests of (input, output) tokens: at least one step per token of the longest output, all in each step."""
        count = len(lengths)
        cost = Cost(max(out for _, out in lengths) * (self.chosen(count) + 2 * count * self.state_bytes))
        for length, out in lengths:
            cost += Cost(flop=self.prefill(length).flop)
            steps = out - 1  # the first token is that of the prompt
            context = steps * length + steps * (steps + 1) / 2
            cost += Cost((context + length + steps) * self.kv_token_bytes)
            cost += Cost(flop=2 * self.active * steps + context * self.attention_flop)
        return cost


def measure(device: str) -> Ceilings:
    """The fastest of several copies, reductions and products of random numbers. Takes about a second on a GPU."""
    import torch

    found = _measure(device)
    if device == "cuda":
        torch.cuda.empty_cache()  # an engine takes what is free
    return found


def _measure(device: str) -> Ceilings:
    import torch

    on_gpu = device == "cuda"
    source = torch.rand((2 << 30 if on_gpu else 16 << 20) // 4, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / _fastest(lambda: target.copy_(source), on_gpu)
    read = source.nbytes / _fastest(lambda: source.max(), on_gpu)  # as weights are; memory may be faster without writes
    side, dtype = (8192, torch.bfloat16) if on_gpu else (512, torch.float32)
    row, weight = torch.randn(1, side, device=device, dtype=dtype), source.view(dtype).view(-1, side)
    multiplied = weight.nbytes / _fastest(lambda: row @ weight.t(), on_gpu)
    a, b = torch.randn(2, side, side, device=device, dtype=dtype)
    product = _fastest(lambda: a @ b, on_gpu)
    return Ceilings(max(copied, read, multiplied), 2 * side**3 / product)


def _fastest(run: Callable[[], object], on_gpu: bool) -> float:
    import torch

    times = []
    for _ in range(10):
        if on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times)
