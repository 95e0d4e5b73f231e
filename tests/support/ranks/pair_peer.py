"""Rank 1 of a pair: sums the same tensor with rank 0 repeatedly, over all connections between the two."""

import sys

import msgspec
import torch

from headrace_worker.core.config import Rendezvous, ReplicaConfig
from headrace_worker.device.choice import open_device
from headrace_worker.ranks.join import join_team

if __name__ == "__main__":
    device = sys.argv[1]
    config = ReplicaConfig(replica_id="r", model="m", source="", device=device, tp=2)
    team = join_team(
        config, open_device(device), 1, msgspec.msgpack.decode(bytes.fromhex(sys.argv[2]), type=Rendezvous)
    )
    one = torch.ones(1000, device=team.device.torch_device)
    while True:
        team.context.tp.all_reduce(one.clone())
        team.host.gather(torch.ones(4))
