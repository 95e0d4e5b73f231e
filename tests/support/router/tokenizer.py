"""A small tokenizer for the fake replica."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from support.router.fake_replica import REPLY, SPECIAL


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE with a few merges and three special tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(
        [REPLY, "the quick brown fox jumps over the lazy dog", "system user assistant"] * 3, trainer
    )
    return made
