"""A group of one rank, recorded and replayed: the collectives of the ranks, alone and within a model's step.

On a CPU the group is one of gloo, and a replay is a call.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

from gpu_bench.section import Figure, Section, SectionRun

SHAPES = ((1, 4096), (256, 4096), (4096, 4096))  # [rows, hidden] of a step


def run(run: SectionRun) -> Iterator[Figure]:
    import torch
    import torch.distributed as dist

    from headrace_worker.comm.communicators import DeviceCommunicator, OrderedCommunicator
    from headrace_worker.comm.failure_detection import FailureDetector
    from headrace_worker.comm.group import ABORT_SECONDS, device_group, host_group
    from headrace_worker.comm.interface import restrict_nccl
    from headrace_worker.device.choice import open_device

    device = open_device(run.device)
    device.use()
    detector = FailureDetector(0)
    detector.start()
    store = dist.HashStore()  # type: ignore[attr-defined]
    if run.device == "cuda":
        restrict_nccl("127.0.0.1")
        group = device_group(store, "one", device.torch_device, 0, 1, detector)
        print("NCCL", torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    else:
        group = host_group(store, "one", "127.0.0.1", 0, 1, detector)
    communicators = {"in any order": DeviceCommunicator(group), "in rank order": OrderedCommunicator(group)}
    dtype = torch.bfloat16 if run.device == "cuda" else torch.float32
    for name, communicator in communicators.items():
        for rows, hidden in SHAPES[: 1 if run.small else None]:
            source = torch.zeros(rows, hidden, dtype=dtype, device=device.torch_device)
            reduced, gathered = torch.empty_like(source), torch.empty_like(source)

            def step(
                one: Any = communicator, source: Any = source, reduced: Any = reduced, gathered: Any = gathered
            ) -> None:
                reduced.copy_(source)
                one.all_reduce(reduced)
                gathered.copy_(one.all_gather(source))

            replay = recorded(device.recorder(), step)
            right = True
            for _ in range(3):
                source.copy_(torch.randn_like(source))
                replay()
                device.synchronize()
                right &= torch.equal(reduced, source) and torch.equal(gathered, source)
            yield Figure.check(f"all-reduce and all-gather {name}, {rows} x {hidden}, replayed", right)
            began = time.perf_counter()
            for _ in range(20):
                replay()
            device.synchronize()
            yield Figure(f"both {name}, {rows} x {hidden}", (time.perf_counter() - began) / 20 * 1e6, "us")
    yield from in_a_model(run, communicators["in any order"])
    aborting = group.abort()
    aborting.join(ABORT_SECONDS + 5.0)
    # NCCL waits until no recording has a collective of the group: with one rank there is none to record.
    yield Figure.check("the abort of a group ends", not aborting.is_alive())
    again = torch.ones(4, device=device.torch_device) * 2
    yield Figure.check("the device computes after the group is aborted", float(again.sum()) == 8)
    detector.close()


def in_a_model(run: SectionRun, communicator: Any) -> Iterator[Figure]:
    """Steps with an all-reduce after each attention and MLP, as in a rank of several: the tokens stay the same."""
    from headrace_worker.model.surgery import SurgeryPlan

    prompt_lengths = [(length, 16) for length in (3, 17, 60, 130)]
    bench = run.bench(kv_cache_memory=(64 << 20) if run.small else (1 << 30), plan=SurgeryPlan(native=False))
    without = [completion.token_ids for completion in bench.engine.generate(bench.prompts(prompt_lengths))]
    loaded = bench.close()
    places = [module for name, module in loaded.module.named_modules() if name.endswith(("o_proj", "down_proj"))]
    reduced = [0]

    def reduce(module: object, inputs: object, output: Any) -> Any:
        reduced[0] += 1
        return communicator.all_reduce(output)

    handles = [module.register_forward_hook(reduce) for module in places]
    bench = run.bench(kv_cache_memory=(64 << 20) if run.small else (1 << 30), loaded=loaded)
    called = reduced[0]
    graphs = next((note for note in bench.engine.assembly.notes if "graphs" in note), "no graphs")
    with_group = [completion.token_ids for completion in bench.engine.generate(bench.prompts(prompt_lengths))]
    right = with_group == without and reduced[0] > 0 and (run.device == "cpu" or "sizes" in graphs)
    yield Figure.check(
        "steps with a group's all-reduces, recorded",
        right,
        places=len(places),
        calls_before_serving=called,
        calls_while_serving=reduced[0] - called,
        graphs=graphs,
    )
    bench.close()
    for handle in handles:
        handle.remove()


def recorded(recorder: Any, step: Callable[[], None]) -> Callable[[], None]:
    """The step's replay; the step itself where nothing is recorded."""
    if recorder is None:
        return step

    def without_outputs() -> tuple[()]:
        step()
        return ()

    recorder.warm_up(without_outputs)
    replay: Callable[[], None]
    replay, _ = recorder.record(without_outputs)
    return replay


SECTION = Section("nccl", "a one-rank NCCL group through capture, alone and in a model", ("qwen3-0.6b",), 100, run)
