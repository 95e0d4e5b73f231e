"""Ranks that have not loaded the same do not serve: each one ends with a sentence that names what differs."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace_worker.core.config import Rendezvous
from headrace_worker.ranks.loaded_facts import describe_difference
from support.ranks.families import SMALL
from support.worker.tiny_models import replica_config


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["a", "a", "b"], ["rank 2 has another revision (b, not a)"]),
        (["b", "a", "a"], ["rank 0 has another revision (b, not a)"]),
        (["a", "b"], ["rank 1 has another revision (b, not a)"]),
        (["a", "b", "a", "c"], ["rank 1 has another revision (b, not a)", "rank 3 has another revision (c, not a)"]),
        (["a", "b", "a", None], ["rank 1 has", "rank 3 has another revision (unknown, not a)"]),
        ([str(rank) for rank in range(20)], ["rank 1 has", "and 15 more"]),
    ],
)
def test_the_ranks_that_differ_are_named(values: list[str | None], expected: list[str]) -> None:
    sentence = describe_difference([{} if value is None else {"revision": value} for value in values])
    assert all(part in sentence for part in expected), sentence
    assert len(sentence) < 1000


def change_a_weight(folder: Path) -> None:
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)


def test_every_rank_ends_and_names_the_difference(save_tiny: Any, fork_server: Any, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(save_tiny("llama"), folder)
    change_a_weight(folder)
    config = replica_config(save_tiny("llama"), tp=2, **SMALL)
    first = fork_server.start(config, 0, None)
    opened = bytes.fromhex(fork_server.wait_for(first, "rendezvous", 20))
    rendezvous = msgspec.msgpack.decode(opened, type=Rendezvous)
    second = fork_server.start(replace(config, source=str(folder)), 1, rendezvous)
    for pid in (first, second):
        outcome = fork_server.ended(pid, 60)
        # One that hears of the other's end first says so, with the other's sentence.
        assert outcome.startswith(("RanksDifferError: ", "RankLostError: rank ")), outcome
        assert "The ranks of this replica differ: " in outcome and "rank 1 has another content of" in outcome, outcome
        assert str(folder) not in outcome
