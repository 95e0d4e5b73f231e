"""How many tokens of an answer are to come: of a long one, too."""

from headrace_router.core.placement import FIRST, AnswerLength


def test_it_follows_the_answers_of_a_model() -> None:
    length = AnswerLength()
    assert length.left("a", 0) == FIRST
    for _ in range(500):
        length.add("a", 40)
    assert 39 < length.left("a", 0) < 41 and length.left("b", 0) == FIRST
    assert length.left("a", 10) == 10


def test_an_answer_longer_than_the_mean_goes_on() -> None:
    """Predictions of fewer than no tokens would prefer the slowest replica."""
    length = AnswerLength()
    assert length.left("a", 0, 1500) == FIRST
    assert length.left("a", 1600, 1500) == 100
    assert length.left("a", 1500, 1500) == 1
