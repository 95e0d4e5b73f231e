"""Texts that a tokenizer's normalizer makes much longer are refused before they are tokenized."""

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from headrace_proto.replica_pb2 import ModelFacts
from headrace_proto.tokenizer_bounds import Growth
from headrace_router.text.model_card import LoadedTokenizer, ModelCard
from headrace_router.text.normalized_size import GROWN_BYTES, GrownTextError, NormalizedSize

LIGATURE = "\ufdfa"  # 3 bytes, which NFKC replaces by 33
CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def card(*steps: normalizers.Normalizer) -> ModelCard:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.normalizer = normalizers.Sequence(list(steps))
    return ModelCard(ModelFacts(chat_template=CHAT), LoadedTokenizer(made.to_str().encode()))


@pytest.fixture
def tokenized(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of texts that got as far as the normalizer."""
    lengths: list[int] = []
    check = NormalizedSize.check

    def count(size: NormalizedSize, text: str, param: str) -> None:
        check(size, text, param)
        lengths.append(len(text))

    monkeypatch.setattr(NormalizedSize, "check", count)
    return lengths


def test_a_text_that_grows_is_refused_before_it_is_tokenized(tokenized: list[int]) -> None:
    """A million of these took 6 GB, within the limits of a request."""
    model = card(normalizers.NFKC())
    text = LIGATURE * (GROWN_BYTES // 33 + 1)
    with pytest.raises(GrownTextError, match="4194304 bytes"):
        model.encoder.encode_prompt(text)
    with pytest.raises(GrownTextError) as refused:
        model.encode_chat([{"role": "user", "content": text}])
    assert refused.value.param == "messages" and tokenized == []


def test_texts_that_stay_small_are_encoded() -> None:
    model = card(normalizers.NFKC())
    assert len(model.encoder.encode_prompt(LIGATURE * 1000)) == 33_000
    size = NormalizedSize([(normalizers.NFKC(), Growth(11))])
    size.check(LIGATURE * (GROWN_BYTES // 33), "prompt")
    size.check("word " * (GROWN_BYTES // 4), "prompt")  # longer than the bound, but does not grow
    size.check("한" * (GROWN_BYTES // 4), "prompt")


class Counted:
    """A step that notes how much text it made at a time."""

    def __init__(self, step: normalizers.Normalizer, most: list[int]) -> None:
        self._step, self._most = step, most

    def normalize_str(self, text: str) -> str:
        made: str = self._step.normalize_str(text)
        self._most.append(len(made.encode()))
        return made


def test_what_a_later_step_removes_counts_too() -> None:
    """Only the result was measured: 20,000 characters took 790 MiB on the way."""
    most: list[int] = []
    grow = Counted(normalizers.Replace("a", "\u0301" * 2000), most)
    strip = Counted(normalizers.StripAccents(), most)
    size = NormalizedSize([(grow, Growth(4000)), (strip, Growth(1))])  # type: ignore[list-item]
    with pytest.raises(GrownTextError):
        size.check("ab" * 10_000, "prompt")
    assert max(most) <= 256 * 4001, "a piece at a time"


def test_a_later_step_is_measured_with_what_earlier_ones_made() -> None:
    """A piece of 512 characters has none of what the first step makes of 800."""
    steps = [
        (normalizers.Replace("a" * 40, "b"), Growth(1)),
        (normalizers.Replace("b" * 20, LIGATURE * 20), Growth(3)),
        (normalizers.NFKC(), Growth(11)),
    ]
    size = NormalizedSize(steps)
    size.check("a" * 800 * 6000, "prompt")
    with pytest.raises(GrownTextError):
        size.check("a" * 800 * 2000 + "b" * 20 * 6400, "prompt")


def test_the_steps_of_a_file_are_those_that_are_measured() -> None:
    model = card(normalizers.NFKC(), normalizers.Sequence([normalizers.Replace("~", "~~"), normalizers.StripAccents()]))
    with pytest.raises(GrownTextError):
        model.encoder.encode_prompt("~" * (GROWN_BYTES // 2 + 1))
