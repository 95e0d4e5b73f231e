"""Prompts that another replica has one compute count until its load includes them."""

from headrace_router.core.replica_state import RemotePrompts


def test_a_prompt_counts_until_two_steps_after_the_other_replica_has_its_attempt() -> None:
    prompts, received = RemotePrompts(), set[bytes]()
    prompts.add(b"a", 700, lambda: b"a" in received)
    for step in range(10):
        prompts.stepped(step)
    assert prompts.tokens == 700, "it cannot have been asked for"
    received.add(b"a")
    for step, tokens in ((10, 700), (11, 700), (12, 0)):
        prompts.stepped(step)
        assert prompts.tokens == tokens
    assert not len(prompts)


def test_a_prompt_that_is_computed_or_not_needed_counts_no_more() -> None:
    prompts = RemotePrompts()
    prompts.add(b"a", 700, lambda: False)
    prompts.add(b"b", 30, lambda: False)
    assert prompts.tokens == 730
    assert prompts.discard(b"a") and not prompts.discard(b"a")
    assert prompts.tokens == 30
