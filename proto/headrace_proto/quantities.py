"""Numbers with their unit, as text for sentences."""


def counted(count: int, noun: str) -> str:
    """'1 GPU', '2 GPUs': for nouns with a plural in s."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def size_text(count: int) -> str:
    """For people: '1.50 GiB', '12.0 MiB'."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**20:.1f} MiB"
