"""Shadow memory of one rank's cache: for each slot, the prefix that it was computed from."""

from dataclasses import dataclass, field

from headrace_worker.core.transfer.shards import RankShard
from support.simulation.world import InvariantViolation

Cell = list[int]  # per slot of a block: the tag of the tokens up to there, or NOTHING
NOTHING = -1
INVALID = -2


@dataclass(slots=True)
class Task:
    """One row's work of a step, as it was when the step was planned."""

    start: int
    stop: int
    tags: list[int]  # of positions up to `stop`
    tables: list[dict[int, int]]  # per cache group: block by index
    invalid: bool = False  # the step fails: its output is invalid

    def written(self, size: int) -> list[int]:
        """Blocks of any group that the task writes into."""
        return [table[index] for table in self.tables for index in range(self.start // size, -(-self.stop // size))]


@dataclass(slots=True)
class RankShadow:
    """Detects every read of KV that was computed from another prefix. `cells[layer, head][block]`."""

    number: int
    shard: RankShard
    windows: tuple[int, ...]
    block_size: int
    cells: dict[tuple[int, int], dict[int, Cell]] = field(default_factory=dict)
    parts: list[list[tuple[int, int]]] = field(default_factory=list)  # per cache group
    states: dict[int, int] = field(default_factory=dict)  # of slots: the tag of the tokens before

    def __post_init__(self) -> None:
        self.parts = [
            [(layer, head) for layer in group.layers for head in range(*group.units)]
            for group in self.shard.groups[: len(self.windows)]
        ]
        self.cells = {part: {} for parts in self.parts for part in parts}

    def compute(self, task: Task) -> set[int]:
        """Reads the KV that the task's first query attends to, writes its positions. Returns the written blocks."""
        size, written = self.block_size, set()
        for window, parts, table in zip(self.windows, self.parts, task.tables, strict=True):
            first = max(0, task.start - window + 1) if window else 0
            for index in range(first // size, -(-task.start // size)) if not task.invalid else ():
                low, high = max(first, index * size), min(task.start, (index + 1) * size)
                block, expected = table[index], task.tags[low:high]
                for part in parts:
                    cell = self.cells[part].get(block)
                    if cell is None or cell[low - index * size : high - index * size] != expected:
                        raise InvariantViolation(f"rank {self.number} reads foreign KV in block {block}, {part}")
            for index in range(task.start // size, -(-task.stop // size)):
                low, high = max(task.start, index * size), min(task.stop, (index + 1) * size)
                block = table[index]
                if block == 0:
                    raise InvariantViolation("a plan writes into the null block")
                written.add(block)
                for part in parts:
                    cell = self.cells[part].setdefault(block, [NOTHING] * size)
                    tags = [INVALID] * (high - low) if task.invalid else task.tags[low:high]
                    cell[low - index * size : high - index * size] = tags
        return written

    def read(self, layer: int, heads: range, blocks: tuple[int, ...]) -> list[list[Cell]]:
        """A piece: per head, per block."""
        empty = [NOTHING] * self.block_size
        return [[list(self.cells[layer, head].get(block, empty)) for block in blocks] for head in heads]

    def write(self, layer: int, heads: range, blocks: tuple[int, ...], piece: list[list[Cell]]) -> None:
        for head, cells in zip(heads, piece, strict=True):
            for block, cell in zip(blocks, cells, strict=True):
                self.cells[layer, head][block] = list(cell)
