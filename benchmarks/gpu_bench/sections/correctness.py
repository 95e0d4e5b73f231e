"""Tokens against plain transformers, with CUDA graphs off, then on: in float32 the same, in bfloat16 as close."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gpu_bench.section import Figure, Section, SectionRun

if TYPE_CHECKING:
    from gpu_bench.bench import Bench

LENGTHS = (1, 5, 16, 17, 63, 200, 400, 700)
OUTPUT = 24
TIE = 1e-3  # of logits: closer ones may change places in float32
BFLOAT16_GAP = 0.1  # of the logits' standard deviation, more than the largest gap of plain transformers in bfloat16


def run(run: SectionRun) -> Iterator[Figure]:
    for dtype in ("float32",) if run.device == "cpu" else ("float32", "bfloat16"):
        loaded, texts = None, []
        for graphs in ("off", "full"):
            memory = (64 << 20) if run.small else (2 << 30)
            bench = run.bench(dtype=dtype, cuda_graphs=graphs, kv_cache_memory=memory, loaded=loaded)
            prompts = bench.prompts([(length, OUTPUT) for length in LENGTHS])
            done = [completion.token_ids for completion in bench.engine.generate(prompts)]
            texts.append([[*prompt.token_ids, *tokens] for prompt, tokens in zip(prompts, done, strict=True)])
            loaded = bench.close()
        same = sum(one == other for one, other in zip(*texts, strict=True))
        yield Figure.check(
            f"{dtype}: the same with graphs", dtype != "float32" or same == len(LENGTHS), same=same, of=len(LENGTHS)
        )
        plain = plain_model(bench, loaded)
        for graphs, sequences in zip(("off", "on"), texts, strict=True):
            facts = plain.compare(sequences)
            right = facts["wrong"] == 0 if dtype == "float32" else facts["worst_gap"] <= facts["allowed_gap"]
            yield Figure.check(f"{dtype}, graphs {graphs}: tokens of plain transformers", right, **facts)
        del loaded, plain


def plain_model(bench: "Bench", loaded: Any) -> "PlainModel":
    """With the weights of an engine."""
    import torch

    from headrace_worker import accuracy

    weights = accuracy.dense(bench.config)
    exact = accuracy.plain_model(weights, torch.float32)
    return PlainModel(exact, exact if loaded.dtype is torch.float32 else accuracy.plain_model(weights, loaded.dtype))


class PlainModel:
    """Plain transformers: in float32, and in the engine's format."""

    def __init__(self, exact: Any, rounded: Any) -> None:
        self._exact, self._rounded = exact, rounded

    def compare(self, sequences: list[list[int]], output: int = OUTPUT) -> dict[str, Any]:
        """Each generated token against the logits in float32 after the tokens before it.

        Gaps are those between the best logit and the chosen token's, in standard deviations of the logits.
        """
        positions = wrong = ties = 0
        ours = theirs = 0.0
        for ids in sequences:
            exact, rounded = _logits(self._exact, ids, output), _logits(self._rounded, ids, output)
            chosen = exact.new_tensor(ids[-output:]).long()
            gaps = exact.amax(-1) - exact.gather(-1, chosen[:, None])[:, 0]
            plain_gaps = exact.amax(-1) - exact.gather(-1, rounded.argmax(-1, keepdim=True))[:, 0]
            differ = exact.argmax(-1) != chosen
            positions += len(chosen)
            wrong += int((differ & (gaps >= TIE)).sum())
            ties += int((differ & (gaps < TIE)).sum())
            ours = max(ours, float((gaps / exact.std(-1)).max()))
            theirs = max(theirs, float((plain_gaps / exact.std(-1)).max()))
        return {
            "positions": positions,
            "wrong": wrong,
            "ties": ties,
            "worst_gap": round(ours, 4),
            "allowed_gap": round(theirs + BFLOAT16_GAP, 4),
        }


def _logits(plain: Any, ids: list[int], output: int) -> Any:
    """[output, V] float32, of the positions that each generated token was sampled from."""
    import torch

    with torch.inference_mode():
        return plain(torch.tensor([ids], device=plain.device), use_cache=False).logits[0, -output - 1 : -1].float()


SECTION = Section("correctness", "tokens against plain transformers, graphs off, then on", ("qwen3-0.6b",), 140, run)
