"""A row whose logits are not finite ends its own attempt, and its blocks are not used again."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from headrace_worker.assembly.assemble import assemble
from headrace_worker.core.request import Finish
from headrace_worker.offline import OfflineEngine, Prompt
from headrace_worker.runner.batch import Batch
from headrace_worker.runner.rank_runner import Runner
from support.worker.tiny_models import replica_config

SIZES: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 96}
LONG = list(range(10, 50))  # several full blocks


@pytest.fixture
def offline(tiny: Callable[[str], Any]) -> OfflineEngine:
    folder = tiny("llama")
    return OfflineEngine(assemble(replica_config(folder, kv_cache_memory=1 << 20, **SIZES)))


def _break_rows(patch: pytest.MonkeyPatch, length: int) -> None:
    """The logits of the first token after `length` known ones are not finite."""
    forward = Runner.forward

    def broken(self: Runner, batch: Batch, hidden_in: Tensor | None = None) -> Tensor | None:
        out = forward(self, batch, hidden_in)
        if out is not None:
            for index, position in enumerate(batch.sample_positions):
                if position == length:
                    out[index, 3:] = float("nan")
        return out

    patch.setattr(Runner, "forward", broken)


def test_the_other_rows_of_the_step_are_not_affected(offline: OfflineEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [Prompt([5, 6, 7], 8), Prompt(LONG, 8), Prompt([8, 9], 8)]
    expected = offline.generate(prompts)
    _break_rows(monkeypatch, len(LONG) + 2)
    found = offline.generate(prompts)
    assert [completion.finish for completion in found] == [Finish.LENGTH, Finish.NOT_FINITE, Finish.LENGTH]
    assert found[1].token_ids == expected[1].token_ids[:2]
    assert [found[index].token_ids for index in (0, 2)] == [expected[index].token_ids for index in (0, 2)]


def test_no_request_starts_from_its_blocks(offline: OfflineEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = offline.generate([Prompt(LONG, 4)])
    assert offline.generate([Prompt(LONG, 4)])[0].cached_tokens
    with monkeypatch.context() as patch:
        _break_rows(patch, len(LONG) + 1)
        assert offline.generate([Prompt(LONG, 4)])[0].finish is Finish.NOT_FINITE
    (again,) = offline.generate([Prompt(LONG, 4)])
    assert not again.cached_tokens and again.token_ids == expected[0].token_ids
