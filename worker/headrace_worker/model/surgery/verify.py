"""Verifies that a replacement computes the same as the original."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from headrace_kernels.meta import AttentionMeta, StateMeta
from headrace_worker.model.attention import LayerCache, StepContext, step_context

TOKENS = 5  # tokens of the random input; more than one, fewer than a block
_BLOCK = 8
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}


def random_input(like: Tensor, *shape: int) -> Tensor:
    """The same pseudo-random values every time, in dtype and device of `like`."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(*shape, generator=generator).to(like.device, like.dtype)


@torch.no_grad()
def agrees(original: Callable[[], Tensor], replacement: Callable[[], Tensor]) -> bool:
    """Whether both return the same tensor up to rounding; False when one of them raises or the shapes differ.

    An original that cannot be called with the usual arguments of its kind is not of that kind.
    """
    try:
        expected = original()
        found = replacement()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        return False
    if not isinstance(found, Tensor) or found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    scale = float(expected.float().abs().max())
    worst = float((expected.float() - found.float()).abs().max())
    return scale > 0 and worst <= _TOLERANCE[expected.dtype] * scale


class TinyStep:
    """A step over a pool of two blocks for one layer: T = TOKENS new tokens of one sequence.

    states: of the layer by kind, of one slot, which is read and not written.
    """

    def __init__(
        self,
        layer: int,
        kv_heads: int,
        head_dim: int,
        window: int,
        like: Tensor,
        states: Mapping[str, Tensor] | None = None,
    ) -> None:
        device = like.device
        pool = torch.zeros(2, 2, kv_heads, _BLOCK, head_dim, dtype=like.dtype, device=device)
        self._layers = {layer: LayerCache.of(0, pool, window)}
        self._meta = AttentionMeta(
            query_starts=torch.tensor([0, TOKENS], dtype=torch.int32, device=device),
            seq_lens=torch.tensor([TOKENS], dtype=torch.int32, device=device),
            block_tables=torch.ones(1, 1, dtype=torch.int32, device=device),
            slots=torch.arange(_BLOCK, _BLOCK + TOKENS, device=device),
            max_query_len=TOKENS,
            max_seq_len=TOKENS,
        )
        slot = torch.zeros(1, dtype=torch.int32, device=device)
        self._states = {(layer, kind): pool for kind, pool in (states or {}).items()}
        self._state_meta = StateMeta(self._meta.query_starts, slot, slot) if states else None
        angles = random_input(torch.empty((), device=device), 1, TOKENS, head_dim // 2).repeat(1, 1, 2)
        self.rotary = (angles.cos().to(like.dtype), angles.sin().to(like.dtype))  # [1, T, D] each
        self.positions = torch.arange(TOKENS, device=device).unsqueeze(0)

    def run(self, module: nn.Module, hidden: Tensor) -> Tensor:
        """Call an attention or decoder layer module on hidden [1, T, N]; returns [1, T, N], the first of a tuple."""
        step = StepContext(self._layers, [self._meta], states=self._states, state_meta=self._state_meta)
        with step_context(step):
            out = module(
                hidden_states=hidden,
                position_embeddings=self.rotary,
                attention_mask=None,
                position_ids=self.positions,
            )
        result: Tensor = out[0] if isinstance(out, tuple) else out
        return result
