"""The oracle: the embedded model in an unmodified transformers model, float32."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from headrace_worker.core.config import ReplicaConfig
from headrace_worker.model.load import load
from headrace_worker.model.surgery import SurgeryPlan

TIE = 1e-3  # if the two best logits are closer, either may be chosen (docs/design.md)


class PlainModel:
    """Checks greedy tokens by one forward over prompt + outputs: each must be the best after those before it."""

    def __init__(self) -> None:
        config = ReplicaConfig(replica_id="plain", model="plain", source="smollm2", dtype="float32")
        loaded = load(config, plan=SurgeryPlan.none())
        self._model: Any = AutoModelForCausalLM.from_config(
            loaded.config, attn_implementation="sdpa", dtype=torch.float32
        )
        self._model.load_state_dict(loaded.module.state_dict(), strict=False)
        self._model.tie_weights()
        self._model.eval()

    def logprobs(self, tokens: Sequence[int]) -> torch.Tensor:
        """[len(tokens) - 1, V]: of what follows each token but the last."""
        with torch.inference_mode():
            logits: torch.Tensor = self._model(torch.tensor([list(tokens)])).logits[0, :-1].float()
        return logits.log_softmax(-1)

    def ties(self, prompt: Sequence[int], output: Sequence[int], logprobs: Sequence[float] = ()) -> int:
        """The number of ties in `output`; fails if a token is not the best, or a logprob differs by 1e-3."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1].float()
        expected = logits.log_softmax(-1)
        found = 0
        for row, token in enumerate(output):
            best = int(logits[row].argmax())
            if token != best:
                gap = float(logits[row, best] - logits[row, token])
                assert gap < TIE, f"output {row}: {token}, where transformers has {best} by {gap}"
                found += 1
            if row < len(logprobs):
                assert abs(logprobs[row] - float(expected[row, token])) < 1e-3
        return found


def same_but_for_ties(
    bodies: Sequence[dict[str, Any]], found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]
) -> None:
    """Asserts equal greedy tokens; where they differ, plain transformers checks each of them."""
    assert [len(one) for one in found] == [len(other) for other in expected]
    different = [
        (body["prompt"], list(one))
        for body, one, other in zip(bodies, found, expected, strict=True)
        if list(one) != list(other)
    ]
    if different:
        plain = PlainModel()
        print("ties:", sum(plain.ties(prompt, tokens) for prompt, tokens in different))
