"""Models with recurrent state against plain transformers: alone, in a batch, in chunks, preempted, after a failed step.

The oracle is `generate` with a mask: it hides prompt tokens that equal the padding token without one.
"""

from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

from headrace_base.errors import MemoryTooSmallError, ModelUnsupportedError
from headrace_kernels.meta import StateMeta
from headrace_proto.role import Role
from headrace_worker.core.plan import RowSampling
from headrace_worker.model.attention import StepContext, step_context
from headrace_worker.model.headers import check_options, read_headers
from headrace_worker.model.load import LoadedModel, load
from headrace_worker.model.recurrent import redirect_module
from headrace_worker.model.source import resolve
from headrace_worker.offline import Completion, OfflineEngine, Prompt
from support.worker.tiny_models import RECURRENT, RECURRENT_WITH_IMAGES, TINY, auto_class, replica_config, save_random

# Their experts, and what makes queries of latents, are torch's, in products whose bits depend on the batch.
INEXACT = ("bailing_hybrid", "kimi_linear", "lfm2_moe")
GREEDY = RowSampling(temperature=0.0, logprobs=1)
NEW = 10


class Subject:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loaded: LoadedModel = load(replica_config(folder))
        config = AutoConfig.from_pretrained(folder)
        self.plain: Any = auto_class(config).from_pretrained(folder, dtype=torch.float32).eval()

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


@pytest.fixture(scope="module", params=RECURRENT)
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


def bits(subject: Subject, completions: Sequence[Completion]) -> list[Any]:
    """Tokens, and log-probabilities unless torch computes parts whose bits depend on the batch."""
    exact = subject.loaded.config.model_type not in INEXACT
    return [(done.token_ids, [entry.logprob for entry in done.logprobs] if exact else []) for done in completions]


def test_alone_in_a_batch_in_chunks_and_preempted(subject: Subject, prompts: list[list[int]]) -> None:
    """With the same bits, too, whatever the sizes are, and with two threads, for which "odd" has enough work."""
    wanted = [subject.expected(prompt) for prompt in prompts]
    engine = subject.engine()
    together = run(engine, prompts)
    assert [done.token_ids for done in together] == wanted
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
        assert bits(subject, others) == bits(subject, together)


def test_hits_next_turns_and_choices(subject: Subject, prompts: list[list[int]]) -> None:
    engine, fresh = subject.engine(), subject.engine()
    first = run(engine, prompts)
    again = run(engine, prompts)
    assert [done.cached_tokens for done in again] == [28, 0, 12, 32, 0], "a block before the end of each prompt"
    assert bits(subject, again) == bits(subject, first)

    turns = [prompt + done.token_ids + [7, 8, 9] for prompt, done in zip(prompts, first, strict=True)]
    seconds = run(engine, turns)
    assert [done.token_ids for done in seconds] == [subject.expected(turn) for turn in turns]
    ends = [(len(prompt) + NEW - 1) // 4 * 4 for prompt in prompts]  # of the answers, in blocks: without the last token
    assert [done.cached_tokens for done in seconds] == ends
    assert bits(subject, seconds) == bits(subject, [run(fresh, [turn])[0] for turn in turns])

    choices = run(subject.engine(), [prompts[0]] * 3)
    assert [done.cached_tokens for done in choices] == [0, 32, 32]
    assert bits(subject, choices) == bits(subject, first[:1] * 3)


@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba", "jamba", "lfm2"])
def test_deterministic(family: str, tiny: Callable[[str], Path], prompts: list[list[int]]) -> None:
    subject = Subject(tiny(family))
    subject.loaded = load(replica_config(subject.folder, deterministic=True))
    done = run(subject.engine(deterministic=True), prompts)
    assert [completion.token_ids for completion in done] == [subject.expected(prompt) for prompt in prompts]


def test_after_failed_steps_requests_start_again(subject: Subject, prompts: list[list[int]]) -> None:
    engine = subject.engine()
    expected = bits(subject, run(engine, prompts))
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
        assert bits(subject, run(engine, prompts)) == expected
    finally:
        runner._compute = forward
    assert calls > 9


@pytest.mark.parametrize("family", RECURRENT_WITH_IMAGES)
def test_the_language_models_of_checkpoints_with_images(
    family: str, tiny: Callable[[str], Path], prompts: list[list[int]]
) -> None:
    subject = Subject(tiny(family))
    done = run(subject.engine(), prompts[:3])
    assert [completion.token_ids for completion in done] == [subject.expected(prompt) for prompt in prompts[:3]]


def test_kimi_delta_attention() -> None:
    """The module alone."""
    sizes = {"linear_num_heads": 4, "linear_head_dim": 8, "layer_types": ["linear_attention"] * 3}
    torch.manual_seed(4)
    module = KimiLinearDeltaAttention(AutoConfig.for_model("kimi_linear", **TINY | sizes), 1).eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    hidden = torch.randn(1, 19, 48)
    with torch.inference_mode():
        expected = module(hidden)
        specs = redirect_module(module, 1)
        states = {(spec.layer, spec.kind): torch.zeros(3, *spec.shape) for spec in specs}
        found = []
        for start, stop, read, write in ((0, 7, 0, 1), (7, 8, 1, 1), (8, 19, 1, 2)):
            meta = StateMeta(*(torch.tensor(x, dtype=torch.int32) for x in ([0, stop - start], [read], [write])))
            with step_context(StepContext({}, [], states=states, state_meta=meta)):
                found.append(module(hidden[:, start:stop]))
    torch.testing.assert_close(torch.cat(found, 1), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kv_offload_dir": "kv"}, "but not to disk yet: leave --kv-offload-dir out"),
        ({"state_snapshots": 0}, "beside those of running requests: give --state-snapshots 1 or more"),
    ],
)
def test_states_on_disk_or_without_a_slot_are_refused(
    options: dict[str, Any], sentence: str, tiny: Callable[[str], Path]
) -> None:
    config = replica_config(tiny("qwen3_next"), kv_offload_memory=1 << 30, **options)
    headers = read_headers(resolve(config.source, "auto", None))
    with pytest.raises(ModelUnsupportedError, match=sentence):
        check_options(config, headers)


def test_a_model_with_attention_alone_is_like_others(tmp_path: Path) -> None:
    """Granite 4 Micro is of a family with recurrent layers, and has none: it may compute prompts for others."""
    options = {**RECURRENT["granitemoehybrid"], "layer_types": ["full_attention"] * 3}
    folder = save_random({"model_type": "granitemoehybrid", **TINY, **options}, tmp_path)
    config = replica_config(folder, role=Role.PREFILL)
    check_options(config, read_headers(resolve(config.source, "auto", None)))
    assert load(config).layout.states == ()


def test_rows_are_as_many_as_have_memory_for_their_states(tiny: Callable[[str], Path]) -> None:
    subject = Subject(tiny("qwen3_next"))
    layout = subject.loaded.layout
    for snapshots, rows in ((None, 2), (0, 6), (7, 3)):
        memory = 2 * 14 * layout.state_bytes
        size = subject.engine(kv_cache_memory=memory, state_snapshots=snapshots).assembly.size
        assert memory // 2 < size.num_bytes <= memory and size.max_num_seqs == rows
        assert size.state_slots == (1 + 2 * rows + snapshots if snapshots is not None else 14)
        assert f"{size.state_slots} recurrent states of" in size.note
        assert size.warnings[0].startswith(f"{rows} requests at a time instead of 8, since each needs two recurrent")
    with pytest.raises(MemoryTooSmallError, match=r"--state-snapshots 12 and the two states .* give 7 or fewer"):
        subject.engine(kv_cache_memory=2 * 14 * layout.state_bytes, state_snapshots=12)
