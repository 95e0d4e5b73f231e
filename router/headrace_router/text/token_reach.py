"""How much text one token can stand for: a bound of a prompt's tokens before it is tokenized."""

from typing import Any

from headrace_router.text.detokenize import byte_of_char

_COMPOSED = 4  # characters that NFC and NFKC may make one of
# Characters of the text that may become one of what is tokenized.
_NORMALIZERS = {"NFC": _COMPOSED, "NFKC": _COMPOSED, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
_KEEPING = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"}  # pre-tokenizers that remove nothing


def token_reach(spec: dict[str, Any]) -> int | None:
    """The most characters of a text that become one token of a tokenizer.json; None where no bound is known.

    Known: byte-pair encoding that has a token for every byte, so that nothing is dropped or merged as unknown, and
    steps before it that remove nothing. Added tokens count as long as they are; one that includes the white space
    around it has no bound.
    """
    model, added = spec.get("model") or {}, spec.get("added_tokens") or []
    factor = _shrinkage(spec.get("normalizer"))
    vocab = model.get("vocab")
    if factor is None or model.get("type") != "BPE" or not isinstance(vocab, dict) or not _keeps_all(spec):
        return None
    if any(token.get("lstrip") or token.get("rstrip") for token in added):
        return None
    if not _has_all_bytes(spec, vocab):
        return None
    # The name of an added token is normalized, too, and may become longer.
    names = max((len(token["content"]) for token in added), default=0)
    return factor * max(max(map(len, vocab)), _COMPOSED * names)


def _shrinkage(normalizer: dict[str, Any] | None) -> int | None:
    """How many characters may become one; None if it is not known."""
    if normalizer is None:
        return 1
    kind = normalizer.get("type")
    if kind == "Sequence":
        factor = 1
        for step in normalizer.get("normalizers", []):
            if (own := _shrinkage(step)) is None:
                return None
            factor *= own
        return factor
    if kind == "Replace":
        pattern = normalizer.get("pattern", {}).get("String")
        content = normalizer.get("content", "")
        return 1 if isinstance(pattern, str) and 0 < len(pattern) <= len(content) else None
    return _NORMALIZERS.get(str(kind))


def _keeps_all(spec: dict[str, Any]) -> bool:
    return all(
        step.get("type") in _KEEPING or (step.get("type") == "Split" and step.get("behavior") != "Removed")
        for step in _pre_tokenizers(spec)
    )


def _pre_tokenizers(spec: dict[str, Any]) -> list[dict[str, Any]]:
    step = spec.get("pre_tokenizer")
    if step is None:
        return []
    return list(step.get("pretokenizers", [])) if step.get("type") == "Sequence" else [step]


def _has_all_bytes(spec: dict[str, Any], vocab: dict[str, int]) -> bool:
    if spec["model"].get("byte_fallback"):
        return all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    steps = [*_pre_tokenizers(spec), spec.get("normalizer") or {}]
    by_byte = any(step.get("type") == "ByteLevel" for step in steps)
    return by_byte and byte_of_char().keys() <= vocab.keys()
