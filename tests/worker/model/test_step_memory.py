"""The memory of steps, recordings and libraries is measured before the KV cache gets the rest."""

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import Mock

import pytest
from torch import Tensor

from headrace_base.errors import MemoryTooSmallError
from headrace_worker.assembly.assemble import assemble
from headrace_worker.core.kv.sizing import gpu_headroom, size_kv
from headrace_worker.core.step_runner import RunnerBrokenError
from headrace_worker.runner.graphs import MIXED_TOKENS, decode_sizes
from headrace_worker.runner.rank_runner import Runner
from support.worker.engine_bench import make_layout
from support.worker.recorders import CallingRecorder
from support.worker.recording_device import RecordingDevice
from support.worker.tiny_models import replica_config

T = TypeVar("T")

MIB = 1 << 20
SIZES: dict[str, Any] = {"max_num_seqs": 40, "max_num_batched_tokens": 24, "max_model_len": 64}


class FullError(RuntimeError):
    """What an allocation raises."""


@pytest.fixture
def folder(tiny: Callable[[str], Any]) -> Path:
    made: Path = tiny("llama")
    return made


class LiveRecorder(CallingRecorder):
    """Its recordings hold no reference to their step: as those of CUDA, they live as long as they are kept."""

    def __init__(self, sizes: list[int]) -> None:
        """`sizes`: bytes of the recordings, in their order; all after them take as many as the last one."""
        super().__init__()
        self._sizes = sizes
        self._alive: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.inputs = 0  # bytes of what was allocated last

    @property
    def taken(self) -> int:
        """Bytes of all that is alive."""
        return sum(self._alive.values())

    def allocate(self, make: Callable[[], T]) -> T:
        made = super().allocate(make)
        assert isinstance(made, dict)
        self.inputs = 0
        for tensors in made.values():
            self._alive[tensors.packed] = tensors.packed.nbytes
            self.inputs += tensors.packed.nbytes
        return made

    def record(self, step: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], None], Sequence[Tensor]]:
        def replay() -> None:
            """Nothing is replayed."""

        self._alive[replay] = self._sizes[min(len(self.replays), len(self._sizes) - 1)]
        self.replays.append(0)
        return replay, self.warmed


class MeteredDevice(RecordingDevice):
    """Its free memory is what live recordings and libraries leave; something is cached at first."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = self.recordings = LiveRecorder([20 * MIB, 10 * MIB, 2 * MIB])
        self.peak = 100 * MIB
        self._cached, self._libraries = 50 * MIB, 0

    def free_memory(self) -> int:
        return self.free - self.recordings.taken - self._cached - self._libraries

    def reset_peak(self) -> None:
        self._cached = 0

    def release_cached(self) -> None:
        super().release_cached()
        self._cached = 0

    def synchronize(self) -> None:
        super().synchronize()
        self._libraries = 7 * MIB  # a step was run


def test_the_cache_gets_what_steps_and_recordings_leave(folder: Path) -> None:
    device = MeteredDevice()
    assembly = assemble(replica_config(folder, **SIZES), device=device)
    others = len(decode_sizes(40)) + len(MIXED_TOKENS) - 2
    graphs = device.recordings.inputs + 30 * MIB + 2 * MIB * others
    (note,) = [note for note in assembly.notes if note.startswith("GPU memory")]
    free = 1024 * MIB - 7 * MIB
    assert f"KV cache {assembly.size.num_bytes / 2**20:.1f} MiB, steps 100.0 MiB" in note
    assert f"recorded steps {graphs / 2**20:.1f} MiB, libraries 7.0 MiB" in note
    assert "headroom (for fragmentation and what is not measured) 0.50 GiB" in note
    largest = 40 * (64 // assembly.model.layout.block_size) + 1
    assert assembly.size.num_blocks == largest, "as many as 40 requests of 64 tokens need"
    small = dict(SIZES, kv_cache_memory=free - 100 * MIB - graphs + MIB)
    with pytest.raises(MemoryTooSmallError, match="--kv-cache-memory is"):
        assemble(replica_config(folder, **small), device=MeteredDevice())


def test_a_step_that_does_not_fit_is_explained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = RecordingDevice()
    device.full = FullError
    monkeypatch.setattr(Runner, "forward", Mock(side_effect=FullError("out of memory")))
    with pytest.raises(MemoryTooSmallError, match=r"A step of 24 tokens does not fit .* --max-num-batched-tokens"):
        assemble(replica_config(folder, **SIZES), device=device)


class FailingAt(CallingRecorder):
    """Its n-th recording raises."""

    def __init__(self, number: int, error: Exception) -> None:
        super().__init__()
        self._number, self._error = number, error

    def record(self, step: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], None], Sequence[Tensor]]:
        if len(self.replays) + 1 == self._number:
            raise self._error
        return super().record(step)


@pytest.mark.parametrize("number", [1, 20])
def test_recordings_that_do_not_fit_beside_the_cache(number: int, folder: Path) -> None:
    device = RecordingDevice()
    device.full = FullError
    device.steps = FailingAt(number, FullError("out of memory"))
    notes = assemble(replica_config(folder, **SIZES), device=device).notes
    (note,) = [note for note in notes if note.startswith("CUDA graphs: off")]
    assert ("--kv-cache-memory" in note) == (number == 20), "the first ones are recorded to measure them"


@pytest.mark.parametrize("number", [1, 20])
def test_an_error_that_ends_the_device_is_not_blamed_on_the_model(number: int, folder: Path) -> None:
    """While recordings are measured, and while they are made for use."""
    device = RecordingDevice()
    device.lost = FullError
    device.steps = FailingAt(number, FullError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(RunnerBrokenError, match=r"^cpu is in error \(FullError: CUDA error: .* encountered\)$"):
        assemble(replica_config(folder, **SIZES), device=device)


@pytest.mark.parametrize(("total", "headroom"), [(16, 0.5), (80, 1.6)])
def test_the_cache_of_a_gpu_leaves_a_fixed_headroom(total: int, headroom: float) -> None:
    layout = make_layout()
    options: dict[str, Any] = {"device_type": "cuda", "max_num_seqs": 1 << 20, "max_model_len": 1 << 20}
    gib = 1 << 30
    sizes = options | {"free": 60 * gib, "reserved": 2 * gib, "headroom": gpu_headroom(total * gib)}
    size = size_kv(layout, **sizes)
    assert size.num_bytes == pytest.approx((58 - headroom) * gib, abs=layout.block_bytes)
    assert f"less {headroom:.2f} GiB for fragmentation and what is not measured" in size.note
    given = size_kv(layout, kv_cache_memory=58 * gib, **sizes)
    assert given.num_bytes == 58 * gib, "a given size may use it"
