"""Block tables on the device follow those on the host, by their changes alone."""

from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
from torch import Tensor

from headrace_worker.assembly.assemble import assemble
from headrace_worker.core.layout import CacheGroupSpec, CacheLayout
from headrace_worker.core.plan import RowInit, RowSampling, TableUpdate, Work
from headrace_worker.device.staging import packed_bytes
from headrace_worker.offline import OfflineEngine, Prompt
from headrace_worker.runner.batch import flatten_work, upload
from headrace_worker.runner.rows import RowState
from support.worker.recording_device import RecordingDevice
from support.worker.step_modes import same
from support.worker.tiny_models import replica_config

ROWS, ENTRIES, BLOCK = 6, 40, 16
LAYOUT = CacheLayout(BLOCK, tuple(CacheGroupSpec(group, (group,), 1, 1, 0) for group in range(2)), 4)


def test_a_thousand_plans() -> None:
    """Rows that are freed, used again and extended, and plans without work: what a sequence reads is current."""
    random, device = Random(0), RecordingDevice()
    device.use()
    rows = RowState(LAYOUT, ROWS, ENTRIES * BLOCK, device)
    used = [0] * ROWS
    for step in range(1000):
        changed = 0
        for row in random.sample(range(ROWS), random.randrange(3)):
            rows.free(row)
            rows.initialise(RowInit(row, step, [1], 1, RowSampling()))
            used[row] = 0
        for row in random.sample(range(ROWS), random.randrange(ROWS)):
            more = min(random.choice([1, 1, 2, 20]), ENTRIES - used[row])
            for group in range(2):
                rows.update_table(TableUpdate(group, row, used[row], [random.randrange(1000) for _ in range(more)]))
            used[row] += more
            changed += 2 * more
        if random.random() < 0.3:
            continue
        items = [Work(row, used[row] * BLOCK - 1, 1, True) for row in range(ROWS) if used[row]]
        batch = upload(flatten_work(items, rows, BLOCK), rows)
        assert batch.changes[0].shape[0] >= changed
        for meta, table in zip(batch.metas, rows.tables, strict=True):
            read = meta.gathered(BLOCK).block_tables
            for place, item in enumerate(items):
                assert np.array_equal(read[place, : used[item.row]], table[item.row, : used[item.row]])
            last = table[[item.row for item in items], [used[item.row] - 1 for item in items]]
            assert meta.slots.tolist() == [int(block) * BLOCK + BLOCK - 1 for block in last]


class CountingDevice(RecordingDevice):
    sent = 0

    def upload(self, tensor: Tensor) -> Tensor:
        self.sent += tensor.nbytes
        return super().upload(tensor)


def test_what_a_step_sends_does_not_grow_with_the_limit_of_tokens() -> None:
    sent = set()
    for max_len in (4096, 131072):
        device = CountingDevice()
        device.use()
        rows = RowState(LAYOUT, 256, max_len, device)
        for row in range(256):
            rows.initialise(RowInit(row, 0, [1, 2, 3], 3, RowSampling()))
            rows.update_table(TableUpdate(0, row, 0, [row + 1]))
        host = flatten_work([Work(row, 10, 1, True) for row in range(256)], rows, BLOCK)
        sent.add((device.sent, packed_bytes(host.padded(256, 256, 512, 1, max_len, rows).arrays)))
    ((initial, each),) = sent
    assert initial == 256 * 3 * 4 and each < 32 << 10, "bytes"


def test_a_long_cached_prompt_has_more_changes_than_a_recorded_step(
    tiny: Callable[[str], Path],
) -> None:
    """Its tokens are those of an engine that records nothing."""
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 4, "kv_cache_memory": 4 << 20}
    device = RecordingDevice()
    engines = [OfflineEngine(replica_config(tiny("llama"), **sizes)) for _ in range(2)]
    engines[1] = OfflineEngine(assemble(replica_config(tiny("llama"), **sizes), device=device))
    random = Random(1)
    ids = [random.randrange(3, 300) for _ in range(200)]
    found = []
    for engine in engines:
        first = engine.generate([Prompt(ids, 2, ignore_eos=True)])
        found.append(first + engine.generate([Prompt(ids, 5, RowSampling(temperature=0.9, seed=4), ignore_eos=True)]))
    assert same(*found)
