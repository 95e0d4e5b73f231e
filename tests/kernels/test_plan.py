"""The plan of attention: every key of every tile once, no piece longer than its share, slots within bounds."""

from random import Random

import pytest
import torch

from headrace_kernels import catalog

if "triton" not in catalog.PAGED_ATTENTION.available():
    pytest.skip("no Triton: pip install triton", allow_module_level=True)

from headrace_kernels.gpu.kernels.plan import plan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KEYS, LEAST, SHORT, HEADS = 64, 2, 4, 2  # keys of a tile, tiles of a piece at least, tokens of a short sequence
MOST = 16  # pieces of a tile


def step(random: Random) -> tuple[list[int], list[int]]:
    """(query_starts, seq_lens) of sequences of all lengths, and padding."""
    starts, lengths = [0], []
    for _ in range(random.choice([1, 2, 5, 17])):
        count = random.choice([1, 1, 1, 0, 2, 4, 5, 16, 40, 130])
        starts.append(starts[-1] + count)
        lengths.append(count + random.choice([0, 1, 63, 64, 700, 16000]))
    padding = random.choice([0, 3])
    return starts + [starts[-1]] * padding, lengths + [0] * padding


def tiles_of(
    starts: list[int], lengths: list[int], window: int, tokens: int, is_long: bool
) -> dict[tuple[int, int], range]:
    """Key tiles by sequence and first token."""
    found = {}
    for seq, length in enumerate(lengths):
        count = starts[seq + 1] - starts[seq]
        if count == 0 or (count > SHORT) != is_long:
            continue
        for first in range(0, count, tokens):
            end = length - count + min(first + tokens, count)
            low = max(length - count + first - window + 1, 0) if window else 0
            found[seq, first] = range(low // KEYS, -(-end // KEYS))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_every_key_is_in_one_piece(seed: int) -> None:
    """The interpreter takes 0.2 s per step."""
    random = Random(seed)
    for _ in range(3500 if DEVICE == "cuda" else 12):
        starts, lengths = step(random)
        window, target, is_long = random.choice([0, 0, 100, 5000]), random.choice([1, 16, 66]), random.random() < 0.5
        tokens, count = (16 if is_long else SHORT), len(lengths)
        capacity = (starts[-1] // tokens if is_long else 0) + count + target
        pieces = torch.full((capacity, 8), 99, dtype=torch.int32, device=DEVICE)
        tiles = capacity - target
        counters = torch.ones(tiles, HEADS, dtype=torch.int32, device=DEVICE)
        plan[(1,)](
            pieces, counters, torch.tensor(starts, dtype=torch.int32, device=DEVICE),
            torch.tensor(lengths, dtype=torch.int32, device=DEVICE), tiles, count, window, target, capacity,
            TILE_TOKENS=tokens, BLOCK_N=KEYS, MIN_TILES=LEAST, MOST=MOST, SHORT=SHORT, LONG=is_long,
            HAS_WINDOW=window > 0, KV_HEADS=HEADS, BLOCK=8,
        )  # fmt: skip
        assert not counters.any()
        expected = tiles_of(starts, lengths, window, tokens, is_long)
        share = max(LEAST, -(-sum(map(len, expected.values())) // target))
        found: dict[tuple[int, int], list[range]] = {}
        slots: list[int] = []
        for seq, first, begin, end, slot, first_slot, number, _ in pieces.tolist():
            if seq >= 0:
                found.setdefault((seq, first), []).append(range(begin, end))
                assert end - begin <= max(share, -(-len(expected[seq, first]) // MOST)) and number <= MOST
                if number > 1:
                    slots.append(slot)
                    assert first_slot <= slot < first_slot + number
        assert {tile: [key for part in parts for key in part] for tile, parts in found.items()} == {
            tile: list(keys) for tile, keys in expected.items()
        }
        assert len(set(slots)) == len(slots) <= 2 * target and max(slots, default=0) < 2 * target
