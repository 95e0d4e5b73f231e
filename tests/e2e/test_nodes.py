"""The commands of docs/nodes.md: nodes of Ray on this machine, each with its own address, home folder and labels."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from ray.cluster_utils import Cluster

from support.e2e.headrace_process import Joined, eventually
from support.e2e.streams import steady_streams
from support.integration.tiny_llama import save_tiny_llama

LEFT, RIGHT = "127.0.0.2", "127.0.0.3"
PROMPT = list(range(5, 295))
FLAGS = ("--served-model-name", "tiny", "--device", "cpu", "--cpu-share", "1", "--cpu-threads", "1")
START_SECONDS = 120


class Nodes:
    """A Ray of a head without CPUs for ranks, and nodes that have room for one rank each."""

    def __init__(self, base: Path, model: Path) -> None:
        self._base = base
        self._model = model
        self._nodes: dict[str, Any] = {}
        options = {"num_cpus": 0, "include_dashboard": False}  # a driver joins a node with its own address only
        self._cluster = Cluster(initialize_head=True, head_node_args=options)

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, address: str, cpus: int = 1, **labels: str) -> None:
        """A node with the model in its own home folder."""
        home = self._base / address
        if not home.exists():
            shutil.copytree(self._model, home / "model")
        self._nodes[address] = self._cluster.add_node(
            num_cpus=cpus, node_ip_address=address, labels=labels, env_vars={"HOME": str(home)}
        )

    def remove(self, address: str) -> None:
        """The node and all of its processes end at once."""
        self._cluster.remove_node(self._nodes.pop(address), allow_graceful=False)

    def drain(self, address: str, seconds: int) -> None:
        """Ray places nothing there any more, and ends it after so many seconds: as SIGTERM of `ray start --block`."""
        reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test"]
        node = ["--node-id", str(self._nodes[address].node_id), "--deadline-remaining-seconds", str(seconds)]
        ray = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", self.address]
        subprocess.run([*ray, *node, *reason], check=True, capture_output=True)

    def close(self) -> None:
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def nodes(tmp_path: Path, model: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path / "nodes", model)
    yield made
    made.close()


@pytest.fixture
def join(tmp_path: Path, nodes: Nodes) -> Iterator[Callable[..., Joined]]:
    """join(MODEL, *flags): a controller and a router."""
    made: list[Joined] = []

    def start(*command: str, router: tuple[str, ...] = ()) -> Joined:
        made.append(Joined(tmp_path / "home", *command, address=nodes.address, router=router))
        return made[-1]

    yield start
    for joined in made:
        joined.close()


def _addresses_between(first: int, second: int) -> set[str]:
    """Of the connections between two processes, without those of Ray, which are mapped ones."""
    ends = [
        {(connection.laddr, connection.raddr) for connection in psutil.Process(pid).net_connections("tcp")}
        for pid in (first, second)
    ]
    found = {local.ip for local, remote in ends[0] if remote and (remote, local) in ends[1]}
    return {address for address in found if not address.startswith("::ffff:")}


def _answer(serve: Joined) -> list[int]:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "return_token_ids": True}
    answer = httpx.post(f"{serve.url}/v1/completions", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return token_ids


@pytest.fixture
def expected(model: Path) -> list[int]:
    """Of plain transformers."""
    import torch
    from transformers import LlamaForCausalLM

    plain = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    out = plain.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    return [int(token) for token in out[0, len(PROMPT) :]]


def test_a_replica_over_two_nodes(join: Any, nodes: Nodes, expected: list[int]) -> None:
    """The head has neither the model nor a rank; the lost node comes back."""
    nodes.add(LEFT, pool="serving")
    nodes.add(RIGHT, pool="serving")
    shape = ("--pp", "2", "--node-labels", '{"pool": "serving"}', "--rank-interface", "lo")
    serve = join("~/model", *FLAGS, *shape)
    serve.await_ready()
    (entry,) = serve.status()["replicas"]
    assert sorted(rank["node"] for rank in entry["ranks"]) == [LEFT, RIGHT]
    assert _addresses_between(*(rank["pid"] for rank in entry["ranks"])) == {"127.0.0.1"}, "those of --rank-interface"
    assert _answer(serve) == expected
    nodes.remove(RIGHT)
    eventually(lambda: "pool=serving" in json.dumps(serve.status()), START_SECONDS, "the reason of the wait")
    nodes.add(RIGHT, pool="serving")
    eventually(lambda: httpx.get(f"{serve.url}/health/ready", trust_env=False).status_code == 200, START_SECONDS)
    assert _answer(serve) == expected


def test_pools_on_groups_of_nodes(join: Any, nodes: Nodes, expected: list[int]) -> None:
    nodes.add(LEFT, pool="decode")
    nodes.add(RIGHT, pool="prefill")
    labels = ("--decode-node-labels", '{"pool": "decode"}', "--prefill-node-labels", '{"pool": "prefill"}')
    pools = ("--decode", "1", "--prefill", "1")
    serve = join("~/model", *FLAGS, *labels, *pools, router=("--disaggregation", "always"))
    serve.await_ready()
    roles = {entry["role"]: [rank["node"] for rank in entry["ranks"]] for entry in serve.status()["replicas"]}
    assert roles == {"decode": [LEFT], "prefill": [RIGHT]}
    assert _answer(serve) == expected
    metrics = httpx.get(f"{serve.url}/metrics", trust_env=False).text
    fetched = [line for line in metrics.splitlines() if line.startswith("headrace_kv_fetched_bytes_total")]
    assert sum(float(line.split()[-1]) for line in fetched) > 0, "the prompt's KV blocks came from the other node"


def test_replicas_are_spread_and_a_node_that_ray_drains_is_left_in_time(join: Any, nodes: Nodes) -> None:
    nodes.add(LEFT, cpus=2)
    nodes.add(RIGHT, cpus=2)
    serve = join("~/model", *FLAGS, "--replicas", "2")
    serve.await_ready()

    def places() -> list[tuple[str, list[str]]]:
        status = serve.status() or {"replicas": []}
        return [(entry["state"], [rank["node"] for rank in entry["ranks"]]) for entry in status["replicas"]]

    eventually(lambda: sorted(places()) == [("ready", [LEFT]), ("ready", [RIGHT])], START_SECONDS, "one on each node")
    body = {"model": "tiny", "prompt": PROMPT[:16], "max_tokens": 16, "ignore_eos": True}
    with steady_streams(serve.url, [body] * 2) as outcomes:
        nodes.drain(LEFT, 60)
        eventually(lambda: places() == [("ready", [RIGHT])] * 2, 60, "that both are on the other node")
    bad = [outcome for _, outcome in outcomes if not outcome.complete or len(outcome.token_ids) != 16]
    print(f"{len(outcomes)} requests while a node was drained, {len(bad)} failed")
    assert len(outcomes) > 20 and not bad, bad[:3]


def test_the_same_command_takes_up_what_runs(join: Any, nodes: Nodes, expected: list[int]) -> None:
    """After the controller was killed, and with another setting."""
    nodes.add(LEFT)
    nodes.add(RIGHT)  # room for the next build
    joined = join("~/model", *FLAGS)
    joined.await_ready()
    ((before,),) = ([rank["pid"] for rank in entry["ranks"]] for entry in joined.status()["replicas"])
    joined.controller.kill()
    joined.controller.wait()
    assert _answer(joined) == expected
    joined.start_controller("~/model", *FLAGS, "--max-num-seqs", "3")
    eventually(lambda: "attached to 1 build" in joined.stderr_text, START_SECONDS, "the next controller")
    assert "1 with other settings" in joined.stderr_text and _answer(joined) == expected

    def replaced() -> bool:
        status = joined.status()
        return bool(status and [entry["generation"] for entry in status["replicas"]] == [2])

    eventually(replaced, START_SECONDS, "the replacement")
    assert before not in [rank["pid"] for rank in joined.status()["replicas"][0]["ranks"]]
    assert _answer(joined) == expected
