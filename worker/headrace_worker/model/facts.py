"""The facts of a model that a router needs to serve it without its files."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateSyntaxError
from tokenizers import Tokenizer

from headrace_proto.errors import ModelLoadError
from headrace_proto.rust_panic import panics_as_errors
from headrace_worker.model.gguf_file import GgufFile
from headrace_worker.model.gguf_metadata import flag, optional_number, text, texts
from headrace_worker.model.gguf_tokenizer import byte_tokenizer, gguf_tokenizer
from headrace_worker.model.json_files import read_object
from headrace_worker.model.source import ModelSource

_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p")
# The embedded file has no generation_config.json. Chosen with benchmarks/answers.py (docs/design.md).
_EMBEDDED_DEFAULTS = {"max_tokens": 512, "temperature": 0.0, "top_p": 0.9}
_NAMED_TOKENS = ("bos", "eos", "unk", "pad")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Tokenizer, template and numbers of a model."""

    tokenizer_json: bytes
    chat_template: str  # Jinja source; empty when the model has none
    special_tokens: dict[str, str]  # "bos_token" -> "<s>", for templates
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    add_bos: bool  # whether plain transformers adds one to a string
    max_positions: int
    vocab_size: int  # rows of the output head
    defaults: dict[str, int | float] = field(default_factory=dict)  # of requests, by the name of the option
    notes: tuple[str, ...] = ()


def max_positions(config: Any) -> int:
    """Maximum number of positions of the model."""
    return int(getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 4096)


def read_facts(
    source: ModelSource, config: Any, gguf: GgufFile | None, vocab_size: int, trust_remote_code: bool = False
) -> ModelFacts:
    """Collect the facts. `vocab_size` is the number of logits that the model computes.

    Raises ModelLoadError.
    """
    if gguf is not None:
        defaults = _EMBEDDED_DEFAULTS if source.embedded else {}
        facts = _gguf_facts(config, gguf, vocab_size, defaults)
    else:
        facts = _folder_facts(source, config, vocab_size, trust_remote_code)
    return facts


def _gguf_facts(config: Any, gguf: GgufFile, vocab_size: int, defaults: dict[str, int | float]) -> ModelFacts:
    data = gguf.metadata
    tokenizer = gguf_tokenizer(data)
    tokens = texts(data, "tokenizer.ggml.tokens")
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: optional_number(data, f"tokenizer.ggml.{keys[name]}_token_id") for name in _NAMED_TOKENS}
    eos = [ids["eos"], *(optional_number(data, f"tokenizer.ggml.{key}_token_id") for key in ("eot", "eom"))]
    return ModelFacts(
        tokenizer_json=tokenizer.to_str().encode(),
        chat_template=text(data, "tokenizer.chat_template", ""),
        special_tokens={
            f"{name}_token": tokens[index]
            for name, index in ids.items()
            if index is not None and 0 <= index < len(tokens)
        },
        eos_token_ids=_ids(*eos),
        bos_token_id=ids["bos"],
        add_bos=flag(data, "tokenizer.ggml.add_bos_token", False),
        max_positions=max_positions(config),
        vocab_size=vocab_size,
        defaults=defaults,
    )


def _folder_facts(source: ModelSource, config: Any, vocab_size: int, trust_remote_code: bool) -> ModelFacts:
    path = source.path / "generation_config.json"
    generation = read_object(path, source.name) if path.is_file() else {}
    eos = (config.eos_token_id, generation.get("eos_token_id"))
    defaults = _defaults(generation)
    if not has_tokenizer(source):
        return ModelFacts(
            tokenizer_json=byte_tokenizer(vocab_size).to_str().encode(),
            chat_template="",
            special_tokens={},
            eos_token_ids=_ids(*eos),
            bos_token_id=config.bos_token_id,
            add_bos=False,
            max_positions=max_positions(config),
            vocab_size=vocab_size,
            defaults=defaults,
            notes=("This dummy model has no tokenizer: text is encoded byte by byte.",),
        )
    tokenizer, with_specials = _load_tokenizer(source, trust_remote_code)
    named = {f"{name}_token": getattr(tokenizer, f"{name}_token", None) for name in _NAMED_TOKENS}
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default", "")
    bos = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else config.bos_token_id
    return ModelFacts(
        tokenizer_json=_backend(tokenizer).to_str().encode(),
        chat_template=str(template or ""),
        special_tokens={name: str(token) for name, token in named.items() if token is not None},
        eos_token_ids=tuple(token for token in _ids(*eos, tokenizer.eos_token_id) if token < vocab_size),
        bos_token_id=bos,
        add_bos=bool(with_specials) and bos is not None and with_specials[0] == bos,
        max_positions=max_positions(config),
        vocab_size=vocab_size,
        defaults=defaults,
    )


def _defaults(generation: dict[str, Any]) -> dict[str, int | float]:
    """Defaults of a generation_config.json. Without do_sample transformers ignores the options of sampling.

    A file that says `do_sample: false` asks for greedy decoding; one that does not mention it leaves the API's default.
    """
    keys = _SAMPLING_KEYS if generation.get("do_sample", False) else ()
    greedy = {"temperature": 0.0} if generation.get("do_sample") is False else {}
    names = (*keys, "repetition_penalty", "max_new_tokens")
    given = {key: generation[key] for key in names if generation.get(key) is not None}
    for key, value in given.items():
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ModelLoadError(f"{key} in generation_config.json is {str(value)[:80]}, not a number: correct it.")
    longest = int(given.pop("max_new_tokens", 0))
    defaults = {key: max(0, int(value)) if key == "top_k" else float(value) for key, value in given.items()}
    return greedy | defaults | ({"max_tokens": longest} if longest > 0 else {})


def _load_tokenizer(source: ModelSource, trust_remote_code: bool) -> tuple[Any, list[int]]:
    """Through transformers, which changes some tokenizers when it loads them: requests must be tokenized alike.

    Returns the ids of "a" with those that the tokenizer itself adds, too.
    """
    from transformers import AutoTokenizer

    check_tokenizer_file(source)
    try:
        with panics_as_errors():
            tokenizer = AutoTokenizer.from_pretrained(
                source.path, trust_remote_code=trust_remote_code, local_files_only=True
            )
            return tokenizer, list(tokenizer.encode("a"))
    except Exception as error:  # tokenizer files are read by code of many kinds; tokenizers raises bare Exception
        raise ModelLoadError(
            f"The tokenizer of {source.name!r} cannot be read ({type(error).__name__}): check its tokenizer files."
        ) from error


def _backend(tokenizer: Any) -> Tokenizer:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ModelLoadError(
            f"The tokenizer ({type(tokenizer).__name__}) has no tokenizer.json form: it cannot be sent to routers."
        )
    backend.no_truncation()
    backend.no_padding()
    return backend


def read_template(path: Path) -> str:
    """The text of a chat template's file. Raises ModelLoadError where it cannot be read, or is not valid Jinja."""
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no text in UTF-8"
        raise ModelLoadError(
            f"--chat-template {path} cannot be read ({reason}): name a file on the machine where the model runs."
        ) from error
    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
    except TemplateSyntaxError as error:
        if "generation" in str(error.message):  # a tag of transformers
            return source
        raise ModelLoadError(
            f"--chat-template {path} is not valid Jinja, line {error.lineno}: {error.message}"
        ) from error
    return source


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


def _ids(*values: object) -> tuple[int, ...]:
    """All ids that are given, one by one or in lists, each once, in order."""
    flat: list[int] = []
    for value in values:
        for entry in value if isinstance(value, (list, tuple)) else [value]:
            if entry is None or entry in flat:
                continue
            if type(entry) is not int or entry < 0:
                raise ModelLoadError(f"{str(entry)[:80]!r} is given as the id of an end token: correct eos_token_id.")
            flat.append(entry)
    return tuple(flat)
