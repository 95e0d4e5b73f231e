"""The tokenizer that a GGUF file's metadata describes, as a `tokenizers` object.

Byte-level BPE (`tokenizer.ggml.model` = gpt2) is rebuilt to equal transformers' tokenizer of the same file, except that
no control or user-defined token is dropped for its characters: as in llama.cpp, each has its own text and id. The
pre-tokenizer split is chosen by `tokenizer.ggml.pre`; unknown names are refused.
"""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from headrace_base.errors import ModelLoadError, ModelUnsupportedError, panics_as_errors
from headrace_worker.model.gguf_metadata import Metadata, numbers, text, texts

_MODEL, _PRE = "tokenizer.ggml.model", "tokenizer.ggml.pre"
_TOKENS, _MERGES, _TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type"
_CONTROL, _USER_DEFINED = 3, 4  # ggml token types
_ADDED = (_CONTROL, _USER_DEFINED)  # matched in the text before the pre-tokenizer splits it

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# None = GPT-2's own split, which is part of ByteLevel. transformers uses it for smollm's vocabulary: none of its merges
# joins digits, so the original's digit split differs only in spaces before digits.
_SPLITS: dict[str, str | None] = {
    "gpt-2": None,
    "default": None,
    "smollm": None,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def check_gguf_tokenizer(metadata: Metadata) -> None:
    """Raises ModelUnsupportedError for an unknown kind, ModelLoadError when parts are missing."""
    kind = text(metadata, _MODEL, "none")
    if kind != "gpt2":
        raise ModelUnsupportedError(
            f"GGUF tokenizer {kind[:80]!r} is not read directly (byte-level BPE, 'gpt2', is): use the safetensors "
            "model."
        )
    pre = text(metadata, _PRE, "default")
    if pre not in _SPLITS:
        raise ModelUnsupportedError(
            f"GGUF pre-tokenizer {pre[:80]!r} is unknown: use the model's safetensors and tokenizer.json instead."
        )
    tokens, types = texts(metadata, _TOKENS), numbers(metadata, _TYPES)
    texts(metadata, _MERGES)
    if len(types) != len(tokens):  # untyped control tokens would be plain text, for the template and for users
        raise ModelLoadError(
            f"The GGUF file has {len(types)} token types for {len(tokens)} tokens: convert the model again, or use "
            "its safetensors."
        )


def gguf_tokenizer(metadata: Metadata) -> Tokenizer:
    """Build the tokenizer. Raises as `check_gguf_tokenizer` does."""
    check_gguf_tokenizer(metadata)
    tokens, types = texts(metadata, _TOKENS), numbers(metadata, _TYPES)
    alphabet = _byte_characters()
    known_characters = set(alphabet)
    vocab = {
        token
        if kind in _ADDED or set(token) <= known_characters
        else "".join(alphabet[byte] for byte in token.encode()): index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
    }
    if len(vocab) != len(tokens):  # a control token would take the id of the text that is spelled as it is
        left_out = min(set(range(len(tokens))) - set(vocab.values()))
        raise ModelLoadError(
            f"The GGUF file spells the token {tokens[left_out][:80]!r} more than once: convert the model again, or use "
            "its safetensors."
        )
    merges = [merge.partition(" ")[::2] for merge in texts(metadata, _MERGES)]
    try:
        with panics_as_errors():
            model = BPE(vocab=vocab, merges=merges, continuing_subword_prefix="", end_of_word_suffix="")
    except Exception as error:  # the tokenizers library raises bare Exception, as for a merge of unknown tokens
        raise ModelLoadError(f"The GGUF file's tokenizer is damaged ({str(error)[:200]}).") from error
    tokenizer = Tokenizer(model)
    split = _SPLITS[text(metadata, _PRE, "default")]
    if split is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind == _CONTROL)
            for token, kind in zip(tokens, types, strict=True)
            if kind in _ADDED
        ]
    )
    return tokenizer


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """A placeholder for models without a tokenizer: token b is byte b, and higher ids decode to an empty string.

    Needs a vocabulary of at least 256 entries.
    """
    if vocab_size < 256:
        raise ModelUnsupportedError(
            f"A byte-level placeholder tokenizer needs 256 vocabulary entries, not {vocab_size}."
        )
    alphabet = _byte_characters()
    tokenizer = Tokenizer(BPE(vocab={symbol: byte for byte, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_characters() -> list[str]:
    """GPT-2's printable character for each byte: printable Latin-1 maps to itself, the rest to U+0100 and above."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    characters, extra = [], 256
    for byte in range(256):
        if byte in plain:
            characters.append(chr(byte))
        else:
            characters.append(chr(extra))
            extra += 1
    return characters
