"""Arithmetic of ranks, stages and places."""

import pytest

from headrace_worker.comm.topology import Topology

SHAPES = [(1, 1), (2, 1), (4, 1), (1, 2), (1, 3), (2, 2), (4, 2), (3, 5)]


def ranks(tp: int, pp: int) -> list[Topology]:
    return [Topology(tp, pp, rank) for rank in range(tp * pp)]


def test_the_picture_in_the_docstring() -> None:
    all_ranks = ranks(2, 3)
    assert [(one.stage, one.place) for one in all_ranks] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [one.peers for one in all_ranks[::2]] == [[0, 1], [2, 3], [4, 5]]
    assert {one.sampler for one in all_ranks} == {4}


@pytest.mark.parametrize(("tp", "pp"), SHAPES)
def test_hidden_states_go_to_the_same_place_of_the_next_stage(tp: int, pp: int) -> None:
    all_ranks = ranks(tp, pp)
    for one in all_ranks:
        if not one.is_last_stage:
            after = all_ranks[one.after]
            assert (after.stage, after.place, after.before) == (one.stage + 1, one.place, one.rank)
    assert [one.is_first_stage for one in all_ranks] == [True] * tp + [False] * (tp * (pp - 1))
