"""The memory of steps, recordings and libraries is measured before the KV cache gets the rest."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace_proto.errors import MemoryTooSmallError
from headrace_worker.assembly.assemble import assemble
from headrace_worker.core.config import ReplicaConfig
from headrace_worker.runner.coverage import LARGEST_OPTIONS, largest_steps
from headrace_worker.runner.graphs import MIXED_TOKENS, decode_sizes
from headrace_worker.runner.runner import Runner
from support.worker.recording_device import RecordingDevice

MIB = 1 << 20
SIZES: dict[str, Any] = {"max_num_seqs": 40, "max_num_batched_tokens": 24, "max_model_len": 64}


class FullError(RuntimeError):
    """What an allocation raises."""


@pytest.fixture
def folder(tiny: Callable[[str], Any], add_tokenizer: Callable[[Any], None]) -> Path:
    made: Path = tiny("llama")
    add_tokenizer(made)
    return made


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RecordingDevice]:
    """Makes a device where a method of an object, or of its recorder, cannot allocate its memory."""

    def fail(*_: Any) -> None:
        raise FullError("out of memory")

    def device(target: Any = None, name: str = "") -> RecordingDevice:
        made = RecordingDevice()
        made.full = FullError
        monkeypatch.setattr(made.steps if target is None else target, name, fail)
        return made

    return device


def test_the_cache_gets_what_steps_and_recordings_leave(folder: Path, replica: Callable[..., ReplicaConfig]) -> None:
    device = RecordingDevice()
    device.peak = 100 * MIB
    # Before the recordings, after the largest ones, after a small one; when all is released, only libraries keep some.
    device.taken = [0, 30 * MIB, 2 * MIB, -25 * MIB]
    assembly = assemble(replica(folder, **SIZES), device=device)
    graphs = 30 * MIB + 2 * MIB * (len(decode_sizes(40)) + len(MIXED_TOKENS) - 2)
    (note,) = [note for note in assembly.notes if note.startswith("GPU memory")]
    free = 1024 * MIB - 7 * MIB
    assert f"KV cache {assembly.size.num_bytes / 2**20:.1f} MiB, steps 100.0 MiB" in note
    assert f"recorded steps {graphs / 2**20:.1f} MiB, libraries 7.0 MiB" in note
    largest = 40 * (64 // assembly.model.layout.block_size) + 1
    assert assembly.size.num_blocks == largest, "as many as 40 requests of 64 tokens need"
    small = dict(SIZES, kv_cache_memory=free - 100 * MIB - graphs + MIB)
    device.free, device.taken = 1024 * MIB, [0, 30 * MIB, 2 * MIB, -25 * MIB]
    with pytest.raises(MemoryTooSmallError, match="--kv-cache-memory is"):
        assemble(replica(folder, **small), device=device)


def test_in_the_largest_step_all_rows_filter_and_report(folder: Path, replica: Callable[..., ReplicaConfig]) -> None:
    layout = assemble(replica(folder, **SIZES)).model.layout
    prompts, decodes, long, frees = largest_steps(layout, 40, 64, 1000)
    assert sum(work.count for work in prompts.work) == 1000 and len(prompts.work) == len(decodes.work) == 40
    assert {init.sampling for init in (*prompts.inits, *long.inits)} == {LARGEST_OPTIONS}
    assert [work.count for work in long.work] == [62] and frees.frees == list(range(40))


def test_a_step_that_does_not_fit_is_explained(
    folder: Path, replica: Callable[..., ReplicaConfig], full: Callable[..., RecordingDevice]
) -> None:
    with pytest.raises(MemoryTooSmallError, match=r"A step of 24 tokens does not fit .* --max-num-batched-tokens"):
        assemble(replica(folder, **SIZES), device=full(Runner, "forward"))


def test_recordings_that_do_not_fit_do_not_blame_the_model(
    folder: Path, replica: Callable[..., ReplicaConfig], full: Callable[..., RecordingDevice]
) -> None:
    notes = assemble(replica(folder, **SIZES), device=full(name="record")).notes
    assert "CUDA graphs: off, as there is too little memory for them: give a smaller --kv-cache-memory." in notes
