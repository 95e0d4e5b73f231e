"""Models with recurrent state against plain transformers: alone, in a batch, in chunks, preempted, after a failed step.

The oracle is `generate` with a mask: it hides prompt tokens that equal the padding token without one.
"""

from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace_proto.errors import ModelUnsupportedError
from headrace_proto.role import Role
from headrace_worker.core.plan import RowSampling
from headrace_worker.model.headers import check_length, read_headers
from headrace_worker.model.load import LoadedModel, load
from headrace_worker.model.source import resolve
from headrace_worker.offline import Completion, OfflineEngine, Prompt
from support.worker.tiny_models import replica_config

FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_text-odd", "qwen3_5_moe_text")
GREEDY = RowSampling(temperature=0.0, logprobs=1)
NEW = 10


class Subject:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loaded: LoadedModel = load(replica_config(folder))
        self.plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def engine(self, **options: Any) -> OfflineEngine:
        defaults = {"max_num_seqs": 8, "max_model_len": 96, "kv_cache_memory": 8 << 20, "max_num_batched_tokens": 512}
        return OfflineEngine(replica_config(self.folder, **defaults | options), self.loaded)

    def expected(self, prompt: Sequence[int]) -> list[int]:
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            out = self.plain.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=None,
                pad_token_id=0,
            )  # fmt: skip
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens


@pytest.fixture(scope="module", params=FAMILIES)
def subject(request: pytest.FixtureRequest, tiny: Callable[[str], Path]) -> Subject:
    return Subject(tiny(request.param))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 300, (length,), generator=generator).tolist() for length in (33, 1, 18, 40, 5)]


def run(
    engine: OfflineEngine, prompts: Sequence[list[int]], between_steps: Callable[[], None] = lambda: None
) -> list[Completion]:
    def after_step() -> None:
        between_steps()
        engine.assembly.engine.scheduler.check()

    work = [Prompt(prompt, NEW, GREEDY, ignore_eos=True) for prompt in prompts]
    done = engine.generate(work, after_step=after_step)
    kv = engine.assembly.kv
    assert kv.states is not None and kv.pool.used == kv.states.pool.used == 0
    return done


def bits(completions: Sequence[Completion]) -> list[Any]:
    """Tokens and log-probabilities."""
    return [(done.token_ids, [entry.logprob for entry in done.logprobs]) for done in completions]


def test_alone_in_a_batch_in_chunks_and_preempted(subject: Subject, prompts: list[list[int]]) -> None:
    """With the same bits, too, whatever the sizes are, and with two threads, for which "odd" has enough work."""
    wanted = [subject.expected(prompt) for prompt in prompts]
    engine = subject.engine()
    together = run(engine, prompts)
    assert [done.token_ids for done in together] == wanted
    assert all(done.cached_tokens == 0 for done in run(engine, prompts)), "states have no snapshots yet"
    tight = subject.engine()
    scheduler, steps = tight.assembly.engine.scheduler, count()

    def preempt() -> None:
        if next(steps) % 4 == 1 and scheduler.running:
            scheduler._preempt(scheduler.running[0])

    preempted = run(tight, prompts, preempt)
    assert sum(done.preemptions for done in preempted) > 1
    chunked = run(subject.engine(max_num_batched_tokens=7), prompts)
    alone = [run(engine, [prompt])[0] for prompt in prompts]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        threaded = run(engine, prompts)
    finally:
        torch.set_num_threads(before)
    for others in (preempted, chunked, alone, threaded):
        assert bits(others) == bits(together)


def test_after_failed_steps_requests_start_again(subject: Subject, prompts: list[list[int]]) -> None:
    engine = subject.engine()
    expected = bits(run(engine, prompts))
    runner: Any = engine.assembly.runner
    forward, calls = runner._compute, 0

    def failing(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        out = forward(*args, **options)  # it has written states when it fails
        if calls in (2, 9):
            raise ValueError("kernel failed")
        return out

    runner._compute = failing
    try:
        assert bits(run(engine, prompts)) == expected
    finally:
        runner._compute = forward
    assert calls > 9


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tp": 2}, "qwen3_next keeps recurrent state, which is not sharded yet: serve it with --tp 1 --pp 1"),
        ({"role": Role.PREFILL}, "recurrent state, which is not transferred yet: its replicas compute every prompt"),
    ],
)
def test_what_is_not_done_with_states_is_refused(
    options: dict[str, Any], sentence: str, tiny: Callable[[str], Path]
) -> None:
    config = replica_config(tiny("qwen3_next"), **options)
    headers = read_headers(resolve(config.source, "auto", None))
    with pytest.raises(ModelUnsupportedError, match=sentence):
        check_length(config, headers)


def test_rows_are_as_many_as_have_memory_for_their_states(subject: Subject) -> None:
    layout = subject.loaded.layout
    engine = subject.engine(kv_cache_memory=100 * layout.block_bytes + 6 * layout.slot_bytes)
    size = engine.assembly.size
    assert size.num_bytes <= 100 * layout.block_bytes + 6 * layout.slot_bytes
    assert size.state_slots == size.max_num_seqs + 1 and f"{size.state_slots} recurrent states" in size.note
