"""Numbers with their unit in sentences."""

from headrace_proto.quantities import counted


def test_one_is_not_a_plural() -> None:
    assert [counted(count, "GPU") for count in (0, 1, 2)] == ["0 GPUs", "1 GPU", "2 GPUs"]
