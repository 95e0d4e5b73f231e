"""Decoding by one rank and by two: tensor parallel and pipeline parallel, on one machine, in one run.

    python benchmarks/ranks.py [--rounds 3] [--save]

Every layout uses the same cores: one rank with all of them, or two with half each. All are built first, then alternate
(A B C A B C). On few cores with one memory bus this measures the cost of splitting, not its gain.
"""

import argparse
import multiprocessing
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import Any

import machine
import torch

from headrace_base.cluster_member import ClusterSecret
from headrace_worker.assembly.assemble import Assembly, assemble
from headrace_worker.comm.rendezvous import RendezvousHost
from headrace_worker.core.config import Rendezvous, ReplicaConfig
from headrace_worker.device.choice import open_device
from headrace_worker.offline import OfflineEngine, Prompt
from headrace_worker.ranks.join import join_team
from headrace_worker.ranks.team import Team
from headrace_worker.replica import Replica

LAYOUTS = {"1 rank": (1, 1), "tp 2": (2, 1), "pp 2": (1, 2)}
BATCHES = (1, 8, 32)
PROMPT, OUTPUT = 32, 32


def run_follower(config: ReplicaConfig, rank: int, rendezvous: Rendezvous) -> None:
    """The process of every rank but the first."""
    replica = Replica(config, ClusterSecret((bytes(16),)), rank)
    replica.start(rendezvous)
    replica.wait()
    replica.stop()


@dataclass
class LayoutReplica:
    """A replica of one layout; its first rank is this process."""

    assembly: Assembly
    threads: int
    team: Team | None
    others: list[Any]

    def tokens_per_second(self, batch: int, seed: int) -> float:
        random = Random(seed)
        prompts = [
            Prompt([random.randrange(20, 40_000) for _ in range(PROMPT)], OUTPUT, ignore_eos=True) for _ in range(batch)
        ]
        torch.set_num_threads(self.threads)
        offline = OfflineEngine(self.assembly)
        done = offline.generate(prompts)
        first = max(completion.first_token_at for completion in done)
        last = max(completion.last_token_at for completion in done)
        return batch * (OUTPUT - 1) / (last - first)

    def close(self) -> None:
        if self.assembly.ranks is not None and self.team is not None:
            self.assembly.ranks.stop()
            for process in self.others:
                process.join(10)
            self.team.close()


def build(tp: int, pp: int, cores: int) -> LayoutReplica:
    """A replica of the embedded model."""
    threads = max(1, cores // (tp * pp))
    config = ReplicaConfig(
        replica_id="bench", model="smollm2", source="smollm2", dtype="float32", device="cpu", tp=tp, pp=pp,
        kv_cache_memory=256 << 20, max_model_len=1024, max_num_seqs=64, cpu_threads=threads,
    )  # fmt: skip
    if tp * pp == 1:
        return LayoutReplica(assemble(config), threads, None, [])
    opened = RendezvousHost("127.0.0.1")
    context = multiprocessing.get_context("spawn")
    others = [
        context.Process(target=run_follower, args=(config, rank, opened.rendezvous)) for rank in range(1, tp * pp)
    ]
    for process in others:
        process.start()
    team = join_team(config, open_device(config.device), 0, opened.rendezvous, opened)
    assembly = assemble(config, team=team)
    team.barrier()
    return LayoutReplica(assembly, threads, team, others)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="append to results/ranks.jsonl")
    arguments = parser.parse_args()
    cores = torch.get_num_threads()
    replicas = {name: build(tp, pp, cores) for name, (tp, pp) in LAYOUTS.items()}
    speeds: dict[str, list[float]] = {f"{name}, batch {batch}": [] for name in replicas for batch in BATCHES}
    for turn in range(arguments.rounds + 1):
        for batch in BATCHES:
            for name, replica in replicas.items():
                found = replica.tokens_per_second(batch, turn)
                if turn:  # the first round warms up
                    speeds[f"{name}, batch {batch}"].append(found)
    for replica in replicas.values():
        replica.close()
    result = {
        name: {"median_tok_s": round(median(values), 1), "all": [round(value, 1) for value in values]}
        for name, values in speeds.items()
    }
    for name, entry in result.items():
        print(f"{name:18s} median {entry['median_tok_s']:8.1f} output tok/s   {entry['all']}")
    if arguments.save:
        print(machine.save("ranks", {"decode_tok_s": result, "cores": cores, "rounds": arguments.rounds}))


if __name__ == "__main__":
    main()
