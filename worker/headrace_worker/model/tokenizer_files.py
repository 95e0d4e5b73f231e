"""The tokenizer of a model folder, and the part of a tokenizer that fits the model."""

import json
from typing import Any

from tokenizers import Tokenizer

from headrace_base.errors import ModelLoadError, panics_as_errors
from headrace_worker.model.json_files import read_object
from headrace_worker.model.source import ModelSource


def has_tokenizer(source: ModelSource) -> bool:
    """Whether a folder has tokenizer files. Raises ModelLoadError when it has none; a dummy model needs none."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
    found = any((source.path / name).is_file() for name in names)
    if not found and source.kind != "dummy":
        raise ModelLoadError(
            f"{source.name!r} has no tokenizer (tokenizer.json or tokenizer.model): download it into the folder."
        )
    return found


def check_tokenizer_file(source: ModelSource) -> None:
    """Raises ModelLoadError for a tokenizer.json that is not JSON."""
    path = source.path / "tokenizer.json"
    if path.is_file():
        read_object(path, source.name)


def load_tokenizer(source: ModelSource, trust_remote_code: bool) -> Any:
    """Through transformers, which changes some tokenizers when it loads them: requests must be tokenized alike.

    Raises ModelLoadError.
    """
    from transformers import AutoTokenizer

    check_tokenizer_file(source)
    try:
        with panics_as_errors():
            tokenizer = AutoTokenizer.from_pretrained(
                source.path, trust_remote_code=trust_remote_code, local_files_only=True
            )
            tokenizer.encode("a")
    except Exception as error:  # tokenizer files are read by code of many kinds; tokenizers raises bare Exception
        raise ModelLoadError(
            f"The tokenizer of {source.name!r} cannot be read ({type(error).__name__}): check its tokenizer files."
        ) from error
    if not isinstance(getattr(tokenizer, "backend_tokenizer", None), Tokenizer):
        raise ModelLoadError(
            f"The tokenizer ({type(tokenizer).__name__}) has no tokenizer.json form: it cannot be sent to routers."
        )
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def fit_tokenizer(tokenizer: Tokenizer, vocab_size: int, bos: int | None) -> tuple[Tokenizer, list[str]]:
    """The tokenizer without the added tokens for which the model has no row, and these in the order of their ids.

    Their text is then encoded as any other. vocab_size: the number of rows. bos: the token that begins each prompt, if
    one does. Raises ModelLoadError where the model would run wrongly: the vocabulary itself has more tokens than the
    model, or a prompt cannot be without one of them.
    """
    beyond = {token: place for token, place in tokenizer.get_vocab().items() if place >= vocab_size}
    needed = [place for place in (*tokenizer.encode("a").ids, bos or 0) if place >= vocab_size]
    if not beyond and not needed:
        return tokenizer, []
    spec = json.loads(tokenizer.to_str())
    model = spec["model"]
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()} - {model.get("unk_token")}
    needed += [place for token, place in beyond.items() if token not in added]
    if needed:
        raise ModelLoadError(
            f"The tokenizer needs the token {tokenizer.id_to_token(min(needed))!r} with the id {min(needed)}, but the "
            f"model has {vocab_size} rows: tokenizer and weights do not belong together."
        )
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["id"] < vocab_size]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {token: place for token, place in model["vocab"].items() if place < vocab_size}
    else:
        model["vocab"] = model["vocab"][:vocab_size]
    if model.get("merges"):
        model["merges"] = [pair for pair in model["merges"] if beyond.keys().isdisjoint([*pair, "".join(pair)])]
    return Tokenizer.from_str(json.dumps(spec)), sorted(beyond, key=lambda token: beyond[token])
