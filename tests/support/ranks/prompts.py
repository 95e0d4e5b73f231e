"""Random prompts for the tiny models."""

from random import Random


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(3, 300) for _ in range(random.randrange(1, 40))] for _ in range(count)]
