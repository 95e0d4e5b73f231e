"""A process in two pairs: when one peer is killed, the other pair still works (docs/design.md relies on it)."""

import subprocess
import sys
import time

import msgspec
import pytest
import torch

from headrace_worker.comm.errors import RankLostError
from headrace_worker.comm.rendezvous import RendezvousHost
from headrace_worker.core.config import ReplicaConfig
from headrace_worker.device.choice import open_device
from headrace_worker.ranks.join import join_team
from headrace_worker.ranks.team import Team
from support.child_environment import child_environment

GPUS_NEEDED = 3  # this process's, and one per peer: NCCL refuses two ranks on one GPU
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(torch.cuda.device_count() < GPUS_NEEDED, reason="NCCL pairs need three GPUs")
    ),
]


def _pair(device: str, gpu: int) -> tuple[Team, "subprocess.Popen[bytes]"]:
    opened = RendezvousHost("127.0.0.1")
    rendezvous = msgspec.msgpack.encode(opened.rendezvous).hex()
    theirs = f"cuda:{gpu}" if device == "cuda" else device
    command = [sys.executable, "-m", "support.ranks.pair_peer", theirs, rendezvous]
    peer = subprocess.Popen(command, env=child_environment())
    config = ReplicaConfig(replica_id="r", model="m", source="", device=device, tp=2)
    return join_team(config, open_device(device), 0, opened.rendezvous, opened), peer


def _exchange(team: Team) -> None:
    total = team.context.tp.all_reduce(torch.ones(1000, device=team.device.torch_device))
    assert total.sum().item() == 2000
    team.host.gather(torch.ones(4))


@pytest.mark.parametrize("device", DEVICES)
def test_the_other_pair_still_works(device: str) -> None:
    (first, first_peer), (second, second_peer) = _pair(device, 1), _pair(device, 2)
    try:
        for team in (first, second, first, second):
            _exchange(team)
        first_peer.kill()
        killed = time.monotonic()
        with pytest.raises(RankLostError, match=rf"rank 1 \(process {first_peer.pid}\) is lost"):
            while True:
                _exchange(first)
        assert time.monotonic() - killed < 2
        for _ in range(100):
            _exchange(second)
        first.close()
        for _ in range(100):
            _exchange(second)
    finally:
        for peer in (first_peer, second_peer):
            peer.kill()
            peer.wait()
        first.close()
        second.close()
