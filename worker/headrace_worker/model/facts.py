"""The facts of a model that a router needs to serve it without its files."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from headrace_base.errors import ModelLoadError, counted
from headrace_worker.model.chat_templates import (
    DEFAULT,
    TOOL_USE,
    gguf_templates,
    processor_template,
    read_template,
    syntax_problem,
    turn_ends,
)
from headrace_worker.model.gguf_file import GgufFile
from headrace_worker.model.gguf_metadata import flag, optional_number, texts
from headrace_worker.model.gguf_tokenizer import byte_tokenizer, gguf_tokenizer
from headrace_worker.model.json_files import read_object
from headrace_worker.model.source import ModelSource
from headrace_worker.model.tokenizer_files import fit_tokenizer, has_tokenizer, load_tokenizer

_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p")
# The embedded file has no generation_config.json. These defaults were chosen with benchmarks/answers.py
# (router/headrace_router/dispatch/README.md).
_EMBEDDED_DEFAULTS = {"max_tokens": 512, "temperature": 0.0, "top_p": 0.9}
_NAMED_TOKENS = ("bos", "eos", "unk", "pad")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Tokenizer, templates and numbers of a model."""

    tokenizer_json: bytes  # all of its ids are below vocab_size
    chat_template: str  # Jinja source; empty when the model has none, or none that is its default
    named_templates: dict[str, str]  # the others, by name
    special_tokens: dict[str, str]  # "bos_token" -> "<s>", for templates
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    add_bos: bool  # whether plain transformers adds one to a string
    max_positions: int
    vocab_size: int  # rows of the output head
    defaults: dict[str, int | float] = field(default_factory=dict)  # defaults of requests, by the name of the option
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class _Files:
    """What the files of a model contain, whether or not the model has a row for each token."""

    tokenizer: Tokenizer
    eos: tuple[int, ...]
    bos: int | None
    add_bos: bool = False
    templates: dict[str, str] = field(default_factory=dict)  # by name; a single one is the default
    special_tokens: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, int | float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def max_positions(config: Any) -> int:
    """Maximum number of positions of the model."""
    return int(getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 4096)


def read_facts(
    source: ModelSource,
    config: Any,
    gguf: GgufFile | None,
    vocab_size: int,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
) -> ModelFacts:
    """Collect the facts. `vocab_size` is the number of logits that the model computes; `chat_template` the path of a
    file instead of the model's own ones.

    Raises ModelLoadError.
    """
    if gguf is not None:
        files = _gguf_files(gguf, _EMBEDDED_DEFAULTS if source.embedded else {})
    else:
        files = _folder_files(source, config, vocab_size, trust_remote_code)
    if chat_template is not None:
        files.templates = {DEFAULT: read_template(Path(chat_template).expanduser())}
    tokenizer, left_out = fit_tokenizer(files.tokenizer, vocab_size, files.bos if files.add_bos else None)
    if left_out:
        files.notes.append(
            f"The model has {vocab_size} rows, and none for {counted(len(left_out), 'added token')} of its tokenizer, "
            f"{left_out[0][:80]!r} first: encoded as text."
        )
    eos = tuple(token for token in files.eos if token < vocab_size)
    ends = turn_ends(files.templates, files.special_tokens, tokenizer, eos)
    files.notes += [
        f"{tokenizer.id_to_token(end)!r} ends answers, too: the chat template ends a turn with it, and the files name "
        "other end tokens only."
        for end in ends
    ]
    templates = {name: template for name, template in files.templates.items() if template}
    files.notes += [
        f"The chat template {name!r} of the model is not valid Jinja, {problem}: chats that need it are refused; give "
        "another one by --chat-template FILE."
        for name, template in templates.items()
        if (problem := syntax_problem(template))
    ]
    if templates.keys() - {DEFAULT}:
        used = f"; {TOOL_USE!r} is used for chats with tools" if TOOL_USE in templates else ""
        files.notes.append(f"The model has the chat templates {', '.join(sorted(templates))}{used}.")
    return ModelFacts(
        tokenizer_json=tokenizer.to_str().encode(),
        chat_template=templates.pop(DEFAULT, ""),
        named_templates=templates,
        special_tokens=files.special_tokens,
        eos_token_ids=(*eos, *ends),
        bos_token_id=files.bos,
        add_bos=files.add_bos,
        max_positions=max_positions(config),
        vocab_size=vocab_size,
        defaults=files.defaults,
        notes=tuple(files.notes),
    )


def _gguf_files(gguf: GgufFile, defaults: dict[str, int | float]) -> _Files:
    data = gguf.metadata
    tokens = texts(data, "tokenizer.ggml.tokens")
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: optional_number(data, f"tokenizer.ggml.{keys[name]}_token_id") for name in _NAMED_TOKENS}
    eos = [ids["eos"], *(optional_number(data, f"tokenizer.ggml.{key}_token_id") for key in ("eot", "eom"))]
    return _Files(
        tokenizer=gguf_tokenizer(data),
        eos=_ids(*eos),
        bos=ids["bos"],
        add_bos=flag(data, "tokenizer.ggml.add_bos_token", False),
        templates=gguf_templates(data),
        special_tokens={
            f"{name}_token": tokens[index]
            for name, index in ids.items()
            if index is not None and 0 <= index < len(tokens)
        },
        defaults=defaults,
    )


def _folder_files(source: ModelSource, config: Any, vocab_size: int, trust_remote_code: bool) -> _Files:
    path = source.path / "generation_config.json"
    generation = read_object(path, source.name) if path.is_file() else {}
    eos = (config.eos_token_id, generation.get("eos_token_id"))
    if not has_tokenizer(source):
        return _Files(
            tokenizer=byte_tokenizer(vocab_size),
            eos=_ids(*eos),
            bos=config.bos_token_id,
            defaults=_defaults(generation),
            notes=["This dummy model has no tokenizer: text is encoded byte by byte."],
        )
    tokenizer = load_tokenizer(source, trust_remote_code)
    with_specials = list(tokenizer.encode("a"))
    named = {f"{name}_token": getattr(tokenizer, f"{name}_token", None) for name in _NAMED_TOKENS}
    templates = tokenizer.chat_template
    templates = dict(templates) if isinstance(templates, dict) else {DEFAULT: str(templates or "")}
    if (processor := processor_template(source)) is not None:
        templates[DEFAULT] = processor
    bos = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else config.bos_token_id
    return _Files(
        tokenizer=tokenizer.backend_tokenizer,
        eos=_ids(*eos, tokenizer.eos_token_id),
        bos=bos,
        add_bos=bool(with_specials) and bos is not None and with_specials[0] == bos,
        templates=templates,
        special_tokens={name: str(token) for name, token in named.items() if token is not None},
        defaults=_defaults(generation),
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
