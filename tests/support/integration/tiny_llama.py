"""A random Llama that starts within a second."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headrace_worker.model.gguf_tokenizer import byte_tokenizer


def save_tiny_llama(folder: Path) -> Path:
    """Saves it, with a byte-level tokenizer of 300 tokens."""
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
