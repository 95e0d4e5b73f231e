"""Tokens of every family's tiny model against plain transformers, in float32, with recorded steps.

Each family has sizes of its own, so most of the time is spent on compiling: several processes share the device.
"""

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from random import Random
from typing import Any

from gpu_bench.section import NO_MODEL, Figure, Section, SectionRun

PROCESSES = 14
SMALL_FAMILY = "deepseek_v3"
LENGTHS = (1, 5, 17, 60, 130)
OUTPUT = 24


def run(run: SectionRun) -> Iterator[Figure]:
    from transformers import CONFIG_MAPPING

    from support.worker.tiny_models import FAMILIES, OTHER_CACHES, RECURRENT

    if run.small:
        facts = compare(SMALL_FAMILY, run.folder, run.device)
        yield Figure.check(SMALL_FAMILY, not facts["wrong"], **facts)
        return
    every = {**RECURRENT, **OTHER_CACHES, **FAMILIES}
    families = [name for name, config in every.items() if config.get("model_type", name) in CONFIG_MAPPING]
    processes = max(1, min(PROCESSES, (os.cpu_count() or 1) - 1))
    # A process per family: after an error of CUDA everything else in its process fails, too.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn, max_tasks_per_child=1) as pool:
        found = {pool.submit(compare, name, run.folder / name, run.device): name for name in families}
        for future in as_completed(found):
            name = found[future]
            try:
                facts = future.result()
            except Exception as error:
                yield Figure.check(name, False, error=f"{type(error).__name__}: {error}"[:600])
            else:
                yield Figure.check(name, not facts["wrong"], **facts)


def compare(family: str, folder: Path, device: str) -> dict[str, Any]:
    """The tokens of an engine against plain transformers, all on the device."""
    import torch
    from transformers import AutoConfig

    from gpu_bench.sections.correctness import PlainModel
    from headrace_worker.assembly.assemble import assemble
    from headrace_worker.offline import OfflineEngine, Prompt
    from support.worker.tiny_models import auto_class, replica_config, save_tiny

    torch.set_num_threads(1)
    save_tiny(family, folder)
    assembly = assemble(
        replica_config(folder, device=device, kv_cache_memory=64 << 20, max_num_seqs=8, max_model_len=256)
    )
    random = Random(0)
    prompts = [Prompt([random.randrange(3, 300) for _ in range(length)], OUTPUT, ignore_eos=True) for length in LENGTHS]
    done = OfflineEngine(assembly).generate(prompts)
    texts = [[*prompt.token_ids, *one.token_ids] for prompt, one in zip(prompts, done, strict=True)]
    plain = auto_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=torch.float32)
    model = plain.to(assembly.model.device.torch_device).eval()
    graphs = next((note for note in assembly.notes if "graphs" in note), "no graphs")
    return PlainModel(model, model).compare(texts, OUTPUT) | {"graphs": graphs}


SECTION = Section("families", "tokens of each family's tiny model against plain transformers", (NO_MODEL,), 150, run)
