"""How long answers are: the mean of the recent ones of each model."""

WEIGHT = 0.02  # of the newest answer
FIRST = 256.0  # tokens, until answers are known
MOST_MODELS = 1024


class AnswerLength:
    """Of one router."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}

    def add(self, model: str, tokens: int) -> None:
        """An answer is complete."""
        mean = self._means.get(model, FIRST)
        if model in self._means or len(self._means) < MOST_MODELS:
            self._means[model] = mean + WEIGHT * (tokens - mean)

    def left(self, model: str, max_tokens: int, output_tokens: int = 0) -> float:
        """Tokens that follow so many of an answer, at least one. max_tokens: of this one; 0 = no limit.

        As if lengths were distributed exponentially: what follows does not depend on what there is.
        """
        mean = self._means.get(model, FIRST)
        return max(1.0, min(mean, max_tokens - output_tokens) if max_tokens else mean)
