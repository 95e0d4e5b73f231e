"""Loads that are made up: what a trace of real users shows too little of."""

from random import Random

from headrace_cluster.simulator.errors import SimulationError
from headrace_cluster.simulator.trace import PRIVATE, Trace, TraceRequest

BLOCK = 64  # tokens
GENERATED = ("shared-prefix", "hot-prefix", "siblings", "chat")


def generated_name(name: str) -> str:
    """As it is listed in GENERATED: case does not matter, and `_` is `-`."""
    return name.lower().replace("_", "-")


def generated(name: str, count: int, seed: int) -> Trace:
    """A load by its name. Raises SimulationError.

    shared-prefix: groups of requests with one long prefix each, in random order, all at once (SGLang's router was
    measured so). hot-prefix: one prefix for all. siblings: 64 requests of one prompt within 50 ms, every 5 s. chat:
    sessions, of which each turn repeats the turns before.
    """
    random = Random(seed)
    name = generated_name(name)
    match name:
        case "shared-prefix":
            requests = _shared_prefix(count, random, groups=max(1, count // 16))
        case "hot-prefix":
            requests = _shared_prefix(count, random, groups=1)
        case "siblings":
            requests = _siblings(count, random)
        case "chat":
            requests = _chat(count, random)
        case _:
            raise SimulationError(f"There is no generated load '{name}'; use one of {', '.join(GENERATED)}.")
    return Trace(f"generated:{name}", sorted(requests, key=lambda each: each.arrival), BLOCK, hashed=True)


class _Blocks:
    """Ids that were not used before."""

    def __init__(self) -> None:
        self._next = PRIVATE

    def new(self, tokens: int) -> tuple[int, ...]:
        count = -(-tokens // BLOCK)
        self._next += count
        return tuple(range(self._next - count, self._next))


def _shared_prefix(count: int, random: Random, groups: int) -> list[TraceRequest]:
    """4,096 tokens of prefix, 128 of a question, 128 of an answer."""
    blocks = _Blocks()
    prefixes = [blocks.new(4096) for _ in range(groups)]
    chosen = [index % groups for index in range(count)]
    random.shuffle(chosen)
    return [
        TraceRequest(index * 0.01, 4096 + 128, 128, prefixes[group] + blocks.new(128), f"g{group}")
        for index, group in enumerate(chosen)
    ]


def _siblings(count: int, random: Random) -> list[TraceRequest]:
    blocks = _Blocks()
    requests = []
    for start in range(0, count, 64):
        prompt = blocks.new(4096)
        requests += [
            TraceRequest(start / 64 * 5.0 + random.random() * 0.05, 4096, 64, prompt, f"s{start}")
            for _ in range(min(64, count - start))
        ]
    return requests


def _chat(count: int, random: Random) -> list[TraceRequest]:
    """Sessions of 1 to 8 turns, 128 to 1,024 tokens a turn, a turn about every 20 s."""
    blocks = _Blocks()
    system = blocks.new(1024)
    requests: list[TraceRequest] = []
    session = 0
    while len(requests) < count:
        session += 1
        at, prompt = session * 0.5 + random.random(), system
        for _ in range(min(random.randint(1, 8), count - len(requests))):
            prompt += blocks.new(BLOCK * random.randint(2, 16))
            output = random.randint(32, 256)
            requests.append(TraceRequest(at, len(prompt) * BLOCK, output, prompt, f"c{session}"))
            at += 5.0 + random.expovariate(1 / 15.0)
    return requests
