"""How long a text becomes in the tokenizer's normalizer, checked before it is tokenized."""

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.normalizers import Normalizer

from headrace_proto.tokenizer_bounds import Growth, flat_steps, step_growth
from headrace_router.core.errors import InvalidRequestError

GROWN_BYTES = 4 << 20  # of a text that the normalizer makes longer
_PIECE_CHARS = 512  # normalized at a time: each may become some thousand bytes


class GrownTextError(InvalidRequestError, code="text_grows"):
    """The model's tokenizer would make a text too long."""

    def __init__(self, param: str) -> None:
        super().__init__(
            f"The model's tokenizer replaces characters of this text by longer ones, which exceed {GROWN_BYTES} "
            "bytes in all: send less of them.",
            param=param,
        )


class NormalizedSize:
    """The bound for the texts of one tokenizer. Used by several threads at once."""

    def __init__(self, steps: Sequence[tuple[Normalizer, Growth]]) -> None:
        """steps: of the normalizer, with the most that each does; what is added to parts of a text is not counted."""
        self._steps = [(normalizer, growth.factor) for normalizer, growth in steps]
        self._factor = 1.0
        for _, factor in self._steps:
            self._factor *= factor

    def check(self, text: str, param: str) -> None:
        """Raises GrownTextError. Slow for texts that may become too long: call off the event loop."""
        size = _size(text)
        if size * self._factor <= GROWN_BYTES:
            return
        most = max(GROWN_BYTES, size)
        for normalizer, factor in self._steps:  # a later step may shorten what an earlier one made too long
            if factor > 1 and _size(text) * factor > most:
                left = most
                for start in range(0, len(text), _PIECE_CHARS):
                    left -= _size(normalizer.normalize_str(text[start : start + _PIECE_CHARS]))
                    if left < 0:
                        raise GrownTextError(param)
            text = normalizer.normalize_str(text)


def normalizer_steps(spec: dict[str, Any]) -> list[tuple[Normalizer, Growth]]:
    """The steps of the normalizer of a checked tokenizer.json."""
    empty = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
    steps: list[tuple[Normalizer, Growth]] = []
    for step in flat_steps(spec.get("normalizer"), "normalizer"):
        normalizer = Tokenizer.from_str(json.dumps(empty | {"normalizer": step})).normalizer
        assert normalizer is not None
        steps.append((normalizer, step_growth(step, "normalizer")))
    return steps


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
