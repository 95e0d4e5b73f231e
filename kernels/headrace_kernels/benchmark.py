"""Times of the ops against torch's own: ``python -m headrace_kernels.benchmark [packed|attention|rows|recurrent|gpu]``.

``gpu`` is ``headrace_kernels.gpu_benchmark`` and needs one. The others are for the CPU, with SmolLM2-135M's shapes:
runs are interleaved, and each line gives the fastest: on a shared machine the least disturbed one (set
GOMP_SPINCOUNT=2000 there). Weights rotate through more memory than the caches hold, as they do in a model.
"""

import functools
import statistics
import sys
import time
from collections.abc import Callable
from math import inf
from typing import Any

import torch

from headrace_kernels import catalog, ops
from headrace_kernels.gpu import availability
from headrace_kernels.meta import AttentionMeta, DrawOptions, StateMeta
from headrace_kernels.packed import Codes, Form, PackedWeight, pack_codes, pack_dense
from headrace_kernels.registry import Op

HEADS, KV_HEADS, HEAD_DIM, BLOCK, HIDDEN, VOCAB = 9, 3, 64, 16, 576, 49152


def fastest(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of the fastest run of each, interleaved."""
    return {name: min(seconds) for name, seconds in measure(runs, rounds).items()}


def measure(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of all runs of each, interleaved."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return times


def on_cpu(op: Op[Any]) -> list[str]:
    """Names of the op's backends for CPU tensors."""
    return [name for name in op.available() if name != "triton"]


def packed() -> None:
    """Weights in few bits against oneDNN's packed float32, in both arithmetics, over one layer's shapes."""
    shapes = ((960, HIDDEN), (HIDDEN, HIDDEN), (3072, HIDDEN), (HIDDEN, 1536))
    layers = 16  # more than the caches hold

    def weights(make: Callable[[int, int], Any]) -> list[Any]:
        return [make(*shape) for _ in range(layers) for shape in shapes]

    def coded(form: Form) -> Callable[[int, int], PackedWeight]:
        def make(out: int, inner: int) -> PackedWeight:
            codes = torch.randint(0, 1 << form.bits, (out, inner), dtype=torch.uint8)
            scale = torch.rand(out, inner // 32).half()
            return pack_codes(Codes(codes, scale, scale), form)

        return make

    kinds: dict[str, list[Any]] = {
        "float32": weights(lambda out, inner: pack_dense(torch.randn(out, inner))),
        "bfloat16": weights(lambda out, inner: pack_dense(torch.randn(out, inner).bfloat16())),
        "8 bits": weights(coded(Form.CODES8)),
        "4 bits": weights(coded(Form.CODES4)),
    }
    linears = weights(_OneDnn)
    for rows in (1, 2, 8, 32, 128, 512):
        inputs = {inner: torch.randn(rows, inner) for _, inner in shapes}
        runs: dict[str, Callable[[], object]] = {
            "oneDNN": lambda: [one(inputs[one.in_features]) for one in linears]  # noqa: B023
        }
        for name, kind in kinds.items():
            for bf16 in (False, True):
                runs[name + (" bf16" if bf16 else "")] = functools.partial(_products, kind, inputs, bf16)
        runs.pop("float32 bf16")
        times = fastest(runs, rounds=10)
        base = times.pop("oneDNN")
        parts = [f"{name} {base / seconds:.2f}x" for name, seconds in times.items()]
        print(f"packed rows {rows:3d}: oneDNN {base / layers * 1e6:6.0f} us a layer; {', '.join(parts)}")


class _OneDnn:
    """A random weight in float32 in the layout of torch's fastest product, for any number of rows."""

    def __init__(self, outputs: int, inputs: int) -> None:
        self.in_features = inputs
        self._packed = torch.ops.mkldnn._reorder_linear_weight(torch.randn(outputs, inputs))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, None, "none", [], "")
        return out


def _products(weights: list[PackedWeight], inputs: dict[int, torch.Tensor], bf16: bool) -> None:
    for weight in weights:
        ops.packed_matmul(inputs[weight.inputs], weight, None, bf16)


def attention() -> None:
    """Every attention backend on decode, prefill and mixed batches of (query length, sequence length)."""
    batches = {
        "1 decode at 128": [(1, 128)],
        "1 decode at 2048": [(1, 2048)],
        "1 decode at 8192": [(1, 8192)],
        "32 decode at 200": [(1, 200)] * 32,
        "prefill 512": [(512, 512)],
        "prefill 256 at 2048": [(256, 2048)],
        "prefill 256 + 31 decode": [(256, 256)] + [(1, 200)] * 31,
    }
    for name, lens in batches.items():
        counts = [-(-length // BLOCK) for _, length in lens]
        ids = torch.split(torch.randperm(sum(counts)).int(), counts)
        meta = AttentionMeta(
            query_starts=torch.tensor([0, *(q for q, _ in lens)]).cumsum(0).int(),
            seq_lens=torch.tensor([length for _, length in lens], dtype=torch.int32),
            block_tables=torch.nn.utils.rnn.pad_sequence(list(ids), batch_first=True),
            slots=torch.empty(0, dtype=torch.int64),
            max_query_len=max(q for q, _ in lens),
            max_seq_len=max(length for _, length in lens),
        )
        query = torch.randn(sum(q for q, _ in lens), HEADS, HEAD_DIM)
        pool = torch.randn(2, sum(counts), KV_HEADS, BLOCK, HEAD_DIM)
        runs: dict[str, Callable[[], object]] = {}
        for backend in on_cpu(catalog.PAGED_ATTENTION):
            runs[backend] = functools.partial(catalog.PAGED_ATTENTION.named(backend), query, pool, meta, scale=0.125)
        times = fastest(runs, rounds=15)
        flops = sum(q * (length - q / 2) * 4 * HEADS * HEAD_DIM for q, length in lens)
        parts = [f"{backend} {t * 1e6:6.0f} us ({flops / t / 1e9:3.0f} GFLOP/s)" for backend, t in times.items()]
        print(f"attention {name}: {', '.join(parts)}")


def rows() -> None:
    """Row ops: norms, activation, rope, noise."""
    for count in (1, 32, 256):
        x, weight = torch.randn(count, HIDDEN), torch.ones(HIDDEN)
        gate_up, cos = torch.randn(count, 3072), torch.randn(count, HEAD_DIM)
        query, key = torch.randn(count, HEADS, HEAD_DIM), torch.randn(count, KV_HEADS, HEAD_DIM)
        _compare(count, catalog.RMS_NORM, x, weight, 1e-5)
        _compare(count, catalog.ADD_RMS_NORM, x, x, weight, 1e-5)
        _compare(count, catalog.SILU_MUL, gate_up)
        pool = torch.zeros(2, 16, KV_HEADS, 16, HEAD_DIM)
        _compare(count, catalog.ROPE_WRITE_KV, query, key, key, cos, cos, pool, torch.arange(count))
    for count in (1, 32):
        scores, numbers = torch.randn(count, VOCAB) * 3, torch.arange(count)
        for top_p in (1.0, 0.95):
            options = DrawOptions(torch.tensor([[1.0, top_p, -inf]]), torch.zeros(1, 2, dtype=torch.int64))
            _compare(count, catalog.DRAW, scores, torch.zeros_like(numbers), numbers, options)
        _compare(count, catalog.ROW_LOGSUMEXP, scores)


def recurrent() -> None:
    """A Gated DeltaNet layer of Qwen3.5-9B: what lies between its projections, beside its products and its MLP's."""
    hidden, key_heads, heads, dim, layers = 4096, 16, 32, 128, 4  # as many layers as caches do not hold
    keys, values = key_heads * dim, heads * dim
    sizes = [2 * keys + values, values, heads, heads]
    shapes = ((sum(sizes), hidden), (hidden, values), (24576, hidden), (hidden, 12288))
    taps, weight, rate = torch.randn(4, sizes[0]), torch.rand(dim), torch.rand(heads)
    forms: dict[str, Callable[[int, int], PackedWeight]] = {
        "4 bits": lambda out, inner: pack_codes(
            Codes(torch.randint(0, 16, (out, inner), dtype=torch.uint8), torch.rand(out, inner // 32).half()),
            Form.CODES4,
        ),
        "bfloat16": lambda out, inner: pack_dense(torch.randn(out, inner).bfloat16()),
    }

    def states(projected: torch.Tensor, meta: StateMeta, pools: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for inputs, state in pools:
            mixed, gate, b, a = torch.split(projected, sizes, 1)
            parts = torch.split(ops.causal_conv(mixed, taps.t(), inputs, meta, None, True), [keys, keys, values], 1)
            query, key, value = (part.view(len(part), -1, dim) for part in parts)
            out = ops.delta_rule(query, key, value, ops.softplus(a) * -rate, ops.sigmoid(b), state, meta)
            ops.rms_norm(out, weight, 1e-6).flatten(1) * (gate * ops.sigmoid(gate))

    for form, make in forms.items():
        weights = [make(*shape) for shape in shapes]
        for sequences, tokens in ((8, 1), (1, 512)):
            count = sequences * tokens
            slots = torch.arange(1, sequences + 1, dtype=torch.int32)
            meta = StateMeta(torch.arange(0, count + 1, tokens, dtype=torch.int32), slots, slots)
            pools = [
                (torch.zeros(sequences + 1, 3, sizes[0]), torch.zeros(sequences + 1, heads, dim, dim))
                for _ in range(layers)
            ]
            inputs = {inner: torch.randn(count, inner) for _, inner in shapes}
            runs: dict[str, Callable[[], object]] = {
                "products": functools.partial(_products, weights, inputs, False),
                "states": functools.partial(states, torch.randn(count, sum(sizes)), meta, pools),
            }
            times = {name: statistics.median(seconds) * 1e3 for name, seconds in measure(runs, rounds=5).items()}
            product, state = times["products"], times["states"] / layers
            step = 24 * state / (32 * product + 24 * state)
            print(
                f"recurrent {form}, {sequences} x {tokens} tokens: products {product:.1f} ms a layer, all between them "
                f"{state:.2f} ms: {state / (product + state):.1%}; {step:.1%} of a step with 24 of 32 such layers"
            )


def gpu() -> None:
    """The Triton ops."""
    from headrace_kernels.gpu_benchmark import GpuBenchmark

    print(f"{torch.cuda.get_device_name()}, Triton")
    cases = GpuBenchmark()
    for part in (cases.decode, cases.prefill, cases.rows, cases.products):
        for timing in part():
            print(timing, flush=True)


def _compare(count: int, op: Op[Any], *arguments: object) -> None:
    runs: dict[str, Callable[[], object]] = {name: functools.partial(op.named(name), *arguments) for name in on_cpu(op)}
    times = fastest(runs, rounds=40)
    print(f"{op.name} rows {count:3d}: " + ", ".join(f"{name} {t * 1e6:6.1f} us" for name, t in times.items()))


def main() -> None:
    """Runs the named part, or all."""
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; {' '.join(catalog.describe())}")
    parts: dict[str, Callable[[], None]] = {
        "packed": packed,
        "attention": attention,
        "rows": rows,
        "recurrent": recurrent,
    }
    if torch.cuda.is_available() and availability.missing() is None:
        parts["gpu"] = gpu
    with torch.inference_mode():
        for name, part in parts.items():
            if name in sys.argv[1:] or len(sys.argv) == 1:
                part()


if __name__ == "__main__":
    main()
