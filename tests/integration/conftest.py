"""Router and replicas with a real engine, without Ray and controller, with a tiny random model.

All in one process, or each replica in its own process.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.integration.in_process_cluster import InProcessCluster
from support.integration.process_cluster import ProcessCluster
from support.ranks.process_ranks import ForkServer


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved random Llama with a byte-level tokenizer of 300 tokens."""
    from support.integration.tiny_llama import save_tiny_llama

    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def cluster(tiny_folder: Path) -> Iterator[InProcessCluster]:
    made = InProcessCluster(tiny_folder)
    yield made
    made.close()


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """The process from which replicas are forked."""
    made = ForkServer({"llama"})
    yield made
    made.close()


@pytest.fixture
def process_cluster(tiny_folder: Path, fork_server: ForkServer) -> Iterator[ProcessCluster]:
    """A router in front of replicas that are separate processes."""
    made = ProcessCluster(tiny_folder, fork_server)
    yield made
    made.close()
