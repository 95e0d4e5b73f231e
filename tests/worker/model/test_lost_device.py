"""A rank and its device: the thread that computes; an error of the device ends the engine, not single requests."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from headrace_base.errors import EngineDeadError
from headrace_worker.assembly.assemble import assemble
from headrace_worker.core.plan import RowSampling
from headrace_worker.core.request import Finish, Request
from headrace_worker.core.step_runner import RunnerBrokenError
from headrace_worker.device.gpu_faults import FATAL_XIDS
from headrace_worker.model.load import load
from headrace_worker.offline import OfflineEngine, Prompt
from headrace_worker.replica import Replica
from headrace_worker.runner.rank_runner import Runner
from support.members import MEMBER
from support.worker.recording_device import RecordingDevice
from support.worker.tiny_models import replica_config

SIZES: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
    "max_model_len": 64,
    "kv_cache_memory": 1 << 20,
}
RUNNER = "headrace_worker.runner.rank_runner.Runner"


class LostError(RuntimeError):
    """What a kernel raises when it has broken the device."""


@pytest.fixture
def offline(tiny: Callable[[str], Any]) -> OfflineEngine:
    folder = tiny("llama")
    device = RecordingDevice()
    device.lost = LostError
    return OfflineEngine(assemble(replica_config(folder, **SIZES), device=device))


@pytest.mark.parametrize(
    "target", [f"{RUNNER}.forward", f"{RUNNER}.sample", "headrace_worker.sampler.output.SampleOutput.to_result"]
)
def test_the_engine_ends(offline: OfflineEngine, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise LostError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(target, fail)
    with pytest.raises(RunnerBrokenError, match=r"^cpu is in error \(LostError: CUDA error: .* encountered\)$"):
        offline.generate([Prompt([5, 6, 7], 4), Prompt([8, 9], 4)])


def test_another_error_ends_its_requests_only(offline: OfflineEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError

    with monkeypatch.context() as patch:
        patch.setattr(f"{RUNNER}.forward", fail)
        (failed,) = offline.generate([Prompt([5, 6, 7], 4)])
    assert failed.finish is Finish.ERROR
    assert offline.generate([Prompt([5, 6, 7], 4)])[0].finish is not Finish.ERROR


class DefectiveDevice(RecordingDevice):
    """Reports a fault when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.on_fault: Callable[[str], None] | None = None
        self.watched = True

    def watch_faults(self, on_fault: Callable[[str], None]) -> Callable[[], None]:
        self.on_fault = on_fault

        def end() -> None:
            self.watched = False

        return end


def test_the_rank_ends_at_once_with_the_reason(tiny: Callable[[str], Any]) -> None:
    folder = tiny("llama")
    device = DefectiveDevice()
    rank = Replica(replica_config(folder, kv_cache_memory=1 << 20), MEMBER.secret, device=lambda _: device)
    rank.start()
    try:
        assert device.on_fault is not None
        threading.Timer(0.05, device.on_fault, [f"cuda:0 is defective: {FATAL_XIDS[79]}"]).start()
        with pytest.raises(EngineDeadError, match="cuda:0 is defective: it is no longer on the bus"):
            rank.wait()
    finally:
        rank.stop()
    assert not device.watched


@pytest.mark.parametrize("ahead", ["off", "on"])
def test_a_rank_loads_warms_up_and_steps_on_one_thread(
    tiny: Callable[[str], Any], ahead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenMP has a team of threads for each thread that computes, and two teams of it stand in each other's way."""
    threads: set[int] = set()
    stepped = threading.Event()
    forward = Runner.forward

    def noted_load(*arguments: Any, **named: Any) -> Any:
        threads.add(threading.get_ident())
        return load(*arguments, **named)

    def noted_forward(*arguments: Any, **named: Any) -> Any:
        threads.add(threading.get_ident())
        if rank._running is not None:
            stepped.set()
        return forward(*arguments, **named)

    monkeypatch.setattr("headrace_worker.assembly.assemble.load", noted_load)
    monkeypatch.setattr(Runner, "forward", noted_forward)
    rank = Replica(replica_config(tiny("llama"), async_scheduling=ahead, **SIZES), MEMBER.secret)
    rank.start()
    try:
        loop = rank._running.loop  # type: ignore[union-attr]
        chain = loop._engine.scheduler.kv.start_chain(b"", "")  # type: ignore[union-attr]
        sampling = RowSampling(temperature=0.0)
        loop.submit(Request(b"a" * 16, [5, 6], 2, 6, sampling, frozenset(), chain, 0.0))  # type: ignore[union-attr]
        assert stepped.wait(30)
    finally:
        rank.stop()
    assert len(threads) == 1 and threading.get_ident() not in threads
