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
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from headrace_worker.model.gguf_tokenizer import byte_tokenizer

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(5)
    config = LlamaConfig(
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=320,
        max_position_embeddings=2048,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(300)).save_pretrained(folder)
    return folder


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
