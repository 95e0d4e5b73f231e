"""Which tokenizers replicas send and routers accept: those that cannot make much text, or long tokens, of little.

Nor may they have very many steps, or regular expressions that take long for little text, where that can be read off.

A step of a tokenizer.json may replace a character by thousands, and steps multiply. The library's memory is some 200
bytes per byte of text, and a process that exceeds its memory ends. Sizes are in bytes of UTF-8.
"""

import base64
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from headrace_proto.errors import ModelLoadError

MOST_GROWTH = 8.0  # of a text in pre-tokenizers, and of a token in decoders
# Of one character in normalizers: NFKC makes 33 bytes of one of 3, and published models have several such steps. How
# long a whole text becomes is checked when it is there.
MOST_OF_A_CHARACTER = 4096.0
MOST_REPLACED = 16.0  # of a text by all Replace and Prepend of a normalizer; real ones make a space three bytes
MOST_ADDED = 16.0  # to the beginning of each part of a text between added tokens, by normalizers
TOKEN_CHARS = 2048  # of each token of the vocabulary; those of released models have a few hundred at most
NAME_CHARS = 128  # of the token for what is unknown, and of what marks the parts of words
WORD_CHARS = 1000  # of a word that WordPiece searches, in time that grows with the square
ADDED_TOKENS_BYTES = 16 << 20  # of all added tokens, normalized
STEPS = 64  # of each part; published models have a dozen at most
PATTERN_CHARS = 2048  # of a regular expression that splits text; those of released models have some hundred
REPLACED_CHARS = 64  # of a pattern in normalizers, so that pieces of a text contain it (normalized_size.py)
POST_PROCESSED_TOKENS = 256  # that post-processors add to a text
STRIPPED = 8  # characters of each end of a token, in decoders
_PATTERN_COUNT = 16  # of a repetition in normalizers
_QUANTIFIERS = 4  # of one pattern in normalizers: each may multiply its time by the length of the text
_CAP = 1e12

_NORMALIZERS = {
    "BertNormalizer": 8, "ByteLevel": 2, "Lowercase": 1.5, "NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11, "Nmt": 1,
    "Strip": 1, "StripAccents": 1,
}  # fmt: skip
_PRE_TOKENIZERS = dict.fromkeys(
    ("BertPreTokenizer", "CharDelimiterSplit", "Digits", "FixedLength", "Punctuation", "Split", "UnicodeScripts",
     "Whitespace", "WhitespaceSplit"),
    1,
)  # fmt: skip
_POST_PROCESSORS = {"BertProcessing": 5, "ByteLevel": 0, "RobertaProcessing": 6}  # tokens of one text and of a pair
_SEQUENCES = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}
_DECODERS = {"ByteFallback": 1, "ByteLevel": 3, "Fuse": 1, "Metaspace": 1, "Strip": 1}


class TokenizerBoundsError(ModelLoadError):
    """A tokenizer.json is not valid, or grows text or has tokens beyond what a router accepts."""


class Growth(NamedTuple):
    """How large a text may become: at most `factor` times its size, and `added` bytes."""

    factor: float = 1.0
    added: float = 0.0

    def then(self, later: "Growth") -> "Growth":
        """Of both steps, one after the other."""
        added = self.added * later.factor + later.added
        return Growth(min(self.factor * later.factor, _CAP), min(added, _CAP))


def read_tokenizer(text: str) -> dict[str, Any]:
    """The content of a tokenizer.json. Call it before the library reads the file: that normalizes the added tokens.

    Raises TokenizerBoundsError.
    """
    try:
        spec = json.loads(text, object_pairs_hook=_without_repeats)
        _check(spec)
    except (ValueError, TypeError, AttributeError, KeyError, IndexError, RecursionError) as error:
        raise TokenizerBoundsError("The tokenizer.json is not valid: download it again.") from error
    return dict(spec)


def normalizer_growth(spec: dict[str, Any]) -> Growth:
    """How large the normalizer of a tokenizer.json may make a text."""
    return _growth(spec.get("normalizer"), "normalizer")


def flat_steps(step: dict[str, Any] | None, part: str) -> Iterator[dict[str, Any]]:
    """The steps of a part of a tokenizer.json without the sequences around them, in order."""
    if step is None:
        return
    if step.get("type") != "Sequence":
        yield step
        return
    for inner in step[_SEQUENCES.get(part, "processors")]:
        yield from flat_steps(inner, part)


def _check(spec: dict[str, Any]) -> None:
    for part in _SEQUENCES:
        steps = list(flat_steps(spec.get(part), part))
        if len(steps) > STEPS:
            raise TokenizerBoundsError(f"The tokenizer's {part} has more than {STEPS} steps: remove some of them.")
        for step in steps:
            _check_step(step, part)
    _check_post_processor(list(flat_steps(spec.get("post_processor"), "post_processor")))
    normalized = normalizer_growth(spec)
    if normalized.factor > MOST_OF_A_CHARACTER or normalized.added > MOST_ADDED:
        raise _grows("normalizer")
    replaced = Growth()
    for step in flat_steps(spec.get("normalizer"), "normalizer"):
        if step.get("type") in ("Replace", "Prepend"):
            replaced = replaced.then(step_growth(step, "normalizer"))
    if replaced.factor > MOST_REPLACED:
        raise _grows("normalizer")
    for part in ("pre_tokenizer", "decoder"):
        if sum(_growth(spec.get(part), part)) > MOST_GROWTH:
            raise _grows(part)
    added = spec.get("added_tokens") or []
    sizes = [_size(token["content"]) for token in added if token.get("normalized") is not False]
    if sum(sizes) * normalized.factor + len(sizes) * normalized.added > ADDED_TOKENS_BYTES:
        raise TokenizerBoundsError(
            'The tokenizer\'s normalizer could make its added tokens too long: declare them with "normalized": false.'
        )
    _check_model(spec.get("model") or {}, [token["content"] for token in added])


def _check_step(step: dict[str, Any], part: str) -> None:
    """What a step may cost beside the text that it makes."""
    if part == "decoder" and max(step.get("start") or 0, step.get("stop") or 0) > STRIPPED:
        raise TokenizerBoundsError(f"The tokenizer's decoder strips more than {STRIPPED} characters: correct it.")
    given = step.get("pattern")
    if given is None:
        return
    regex, most = given.get("Regex"), REPLACED_CHARS if part == "normalizer" else PATTERN_CHARS
    if len(given["String"] if regex is None else regex) > most:
        raise TokenizerBoundsError(f"The tokenizer's {part} has a pattern of more than {most} characters: shorten it.")
    if regex is None:
        return
    if part == "decoder":
        raise TokenizerBoundsError(
            "The tokenizer's decoder has a regular expression, and would run it for each token of an answer: "
            'write {"String": ...} instead of {"Regex": ...}.'
        )
    if part == "normalizer" and _may_be_slow(regex):
        raise TokenizerBoundsError(
            f"The tokenizer's normalizer has the regular expression {regex!r}, with groups, repeated repetitions, more "
            f"than {_QUANTIFIERS} of them, or counts above {_PATTERN_COUNT}, and may take very long: simplify it."
        )


def _may_be_slow(regex: str) -> bool:
    """Also of those that match depending on distant text, which groups are needed for."""
    bare = re.sub(r"\\.", "", regex, flags=re.DOTALL)
    return (
        "(" in bare
        or re.search(r"[*+?}][*+{]", bare) is not None
        or len(re.findall(r"[*+?{]", bare)) > _QUANTIFIERS
        or any(len(count) > 3 or int(count) > _PATTERN_COUNT for count in re.findall(r"(?<=[{,])[0-9]+", bare))
    )


def _check_post_processor(steps: list[dict[str, Any]]) -> None:
    added = 0
    for step in steps:
        kind = str(step.get("type"))
        if kind == "TemplateProcessing":
            added += sum(_template_tokens(step.get(name) or [], step["special_tokens"]) for name in ("single", "pair"))
        elif kind in _POST_PROCESSORS:
            added += _POST_PROCESSORS[kind]
        else:
            raise _not_known("post_processor", kind)
    if len(steps) > STEPS or added > POST_PROCESSED_TOKENS:
        raise TokenizerBoundsError(
            f"The tokenizer's post_processor adds more than {POST_PROCESSED_TOKENS} tokens to a text: shorten it."
        )


def _template_tokens(pieces: list[dict[str, Any]], special: dict[str, Any]) -> int:
    """How many tokens a template adds. A text that is repeated in it counts as too many."""
    texts = [piece["Sequence"]["id"] for piece in pieces if "Sequence" in piece]
    if len(texts) != len(set(texts)):
        return POST_PROCESSED_TOKENS + 1
    names = [piece["SpecialToken"]["id"] for piece in pieces if "Sequence" not in piece]
    made = [special.get(name, {"ids": [], "tokens": []}) for name in names]  # one that lacks is the library's error
    return sum(max(1, len(token["ids"]), len(token["tokens"])) for token in made)


def _check_model(model: dict[str, Any], added: list[str]) -> None:
    vocab = model.get("vocab") or {}
    tokens = vocab if isinstance(vocab, dict) else [entry[0] for entry in vocab]
    if max(map(len, (*tokens, *added)), default=0) > TOKEN_CHARS:
        raise TokenizerBoundsError(
            f"The tokenizer has a token of more than {TOKEN_CHARS} characters: remove it from tokenizer.json."
        )
    for name in ("unk_token", "continuing_subword_prefix", "end_of_word_suffix"):
        if len(model.get(name) or "") > NAME_CHARS:
            raise TokenizerBoundsError(f"The tokenizer's {name} has more than {NAME_CHARS} characters: correct it.")
    if (model.get("max_input_chars_per_word") or 0) > WORD_CHARS:
        raise TokenizerBoundsError(
            f"The tokenizer's max_input_chars_per_word is more than {WORD_CHARS}: set it to 100, as models have it."
        )


def _growth(step: dict[str, Any] | None, part: str) -> Growth:
    """Of one step, or a sequence of them. `part`: normalizer, pre_tokenizer or decoder."""
    total = Growth()
    for inner in flat_steps(step, part):
        total = total.then(step_growth(inner, part))
    return total


def step_growth(step: dict[str, Any], part: str) -> Growth:
    """Of one step that is no sequence. Raises TokenizerBoundsError for kinds that are not known."""
    kind = str(step.get("type"))
    own = _OWN.get((part, kind))
    if own is not None:
        return own(step)
    factor = _FIXED[part].get(kind)
    if factor is None:
        raise _not_known(part, kind)
    return Growth(factor)


def _replace(step: dict[str, Any]) -> Growth:
    pattern, content = step["pattern"].get("String"), _size(step["content"])
    if pattern:
        return Growth(max(1.0, content / _size(pattern)))
    return Growth(1 + content, content)  # it may match before and after each character


def _metaspace(step: dict[str, Any]) -> Growth:
    size = _size(step.get("replacement", "▁"))
    return Growth(max(1.0, size), size)


def _byte_level(step: dict[str, Any]) -> Growth:
    return Growth(2, 2 if step.get("add_prefix_space", True) else 0)


def _spaced(marker: str) -> Growth:
    """Spaces in place of a marker; an empty one is between all characters."""
    return Growth() if marker else Growth(2, 1)


def _precompiled(step: dict[str, Any]) -> Growth:
    """sentencepiece's map: the size of a search tree (4 bytes, little-endian), the tree, and what it replaces by."""
    data = base64.b64decode(step["precompiled_charsmap"] or "")
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return Growth(max(1.0, float(max(map(len, texts.split(b"\0"))))))


_OWN: dict[tuple[str, str], Callable[[dict[str, Any]], Growth]] = {
    ("normalizer", "Replace"): _replace,
    ("normalizer", "Prepend"): lambda step: Growth(1, _size(step["prepend"])),
    ("normalizer", "Precompiled"): _precompiled,
    ("pre_tokenizer", "Metaspace"): _metaspace,
    ("pre_tokenizer", "ByteLevel"): _byte_level,
    ("decoder", "Replace"): _replace,
    ("decoder", "BPEDecoder"): lambda step: _spaced(step["suffix"]),
    ("decoder", "CTC"): lambda step: _spaced(step["word_delimiter_token"]),
    ("decoder", "WordPiece"): lambda step: Growth(1, 1),
}
_FIXED: dict[str, Mapping[str, float]] = {
    "normalizer": _NORMALIZERS,
    "pre_tokenizer": _PRE_TOKENIZERS,
    "decoder": _DECODERS,
}


def _size(text: str) -> float:
    return float(len(text.encode("utf-8", "surrogatepass")))


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of two values the library may take another one than this check. A vocabulary has numbers only."""
    made = dict(pairs)
    if len(made) != len(pairs) and not all(type(value) is int for _, value in pairs):
        raise ValueError("a key is given twice")
    return made


def _not_known(part: str, kind: str) -> TokenizerBoundsError:
    return TokenizerBoundsError(
        f"The tokenizer has a {part} of the kind {kind[:40]!r}, which is not known here: a router could not "
        "bound the text that it makes. Use a model with another tokenizer."
    )


def _grows(part: str) -> TokenizerBoundsError:
    return TokenizerBoundsError(
        f"The tokenizer's {part} can make a text much longer, so that a short request would take the router's memory: "
        "remove the steps that replace or prepend long texts from tokenizer.json."
    )
