"""Builds the plans of a runner without a scheduler."""

from dataclasses import dataclass, field

from headrace_worker.core.plan import RowInit, RowSampling, StepPlan, StepResult, TableUpdate, Work
from headrace_worker.runner import Runner


@dataclass
class Driver:
    """Builds plans for a runner: rows in any order, blocks scattered over the pool."""

    runner: Runner
    tokens: dict[int, list[int]] = field(default_factory=dict)
    computed: dict[int, int] = field(default_factory=dict)
    tables: dict[int, int] = field(default_factory=dict)
    steps: int = 0
    row_use: int = 0

    def __post_init__(self) -> None:
        # Odd blocks backwards, then even ones: adjacent blocks of a table are never adjacent in the pool.
        count = self.runner.num_blocks
        self.free = [*range(2, count, 2), *range(1, count, 2)]

    def init(self, row: int, prompt: list[int], sampling: RowSampling | None = None) -> RowInit:
        self.row_use += 1
        self.tokens[row] = list(prompt)
        self.computed[row] = 0
        self.tables[row] = 0
        return RowInit(row, self.row_use, list(prompt), len(prompt), sampling or RowSampling(temperature=0.0))

    def grow(self, row: int, end: int) -> list[TableUpdate]:
        needed = -(-end // self.runner.layout.block_size) - self.tables[row]
        if needed <= 0:
            return []
        first = self.tables[row]
        self.tables[row] += needed
        return [
            TableUpdate(group.index, row, first, [self.free.pop() for _ in range(needed)])
            for group in self.runner.layout.groups
        ]

    def step(
        self, chunks: dict[int, int], inits: list[RowInit] | None = None, frees: list[int] | None = None
    ) -> StepResult:
        """Compute up to `chunks[row]` tokens of each row; a row whose known tokens are all computed samples one."""
        work, updates = [], []
        for row, most in chunks.items():
            start = self.computed[row]
            count = min(most, len(self.tokens[row]) - start)
            draws = start + count == len(self.tokens[row])
            updates += self.grow(row, start + count)
            work.append(Work(row, start, count, draws))
            self.computed[row] = start + count
        self.steps += 1
        plan = StepPlan(self.steps, frees or [], inits or [], updates, work)
        result = self.runner.collect(self.runner.launch(plan))
        drawing = [item.row for item in work if item.sample]
        assert len(result.tokens) == len(drawing)
        for row, token in zip(drawing, result.tokens, strict=True):
            self.tokens[row].append(token)
        return result

    def generate(self, prompts: dict[int, list[int]], count: int, chunk: int = 10_000) -> dict[int, list[int]]:
        """Run all prompts together until each has `count` new tokens; a chunk is computed per row and step."""
        inits = [self.init(row, prompt) for row, prompt in prompts.items()]
        while chunks := {row: chunk for row in prompts if len(self.tokens[row]) < len(prompts[row]) + count}:
            self.step(chunks, inits)
            inits = []
        return {row: self.tokens[row][len(prompt) :] for row, prompt in prompts.items()}
