"""Prompts of different lengths in one rectangle: padding on the left, positions per row.

    row 0:  .  .  the cat  sat        mask 0 0 1 1 1     positions - - 0 1 2, then 3
    row 1: one day the cat sat        mask 1 1 1 1 1     positions 0 1 2 3 4, then 5

Padding on the left puts every row's last token in the last column, so one step decodes all
rows. The price: padded columns are stored and read, and each row needs its own positions.
Chapter 7's engine does without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from kvlab import positions as position_rules
from kvlab.attention import layer_windows
from kvlab.cache import ContiguousKVCache
from kvlab.generate import PromptTooLong, max_outputs, prompt_of
from kvlab.model import Decoder
from kvlab.specs import ModelSpec

__all__ = ["PaddedAttention", "left_pad", "padded_generate"]


def left_pad(
    prompts: Sequence[Sequence[int]], pad_id: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """token_ids and attention_mask, both [batch, longest]; the mask is 0 where padding stands."""
    if not prompts:
        raise PromptTooLong("no prompt given; expected at least one: an empty batch has no shape")
    longest = max(len(prompt) for prompt in prompts)
    missing = [longest - len(prompt) for prompt in prompts]
    ids = [[pad_id] * gap + list(prompt) for gap, prompt in zip(missing, prompts, strict=True)]
    mask = [[0] * gap + [1] * (longest - gap) for gap in missing]
    return torch.tensor(ids), torch.tensor(mask)


class PaddedAttention:
    """The `attend` of a left-padded batch: no query reads a padded key.

    mask  [batch, columns so far], 1 for a real token; the loop makes it one column wider a step
    """

    def __init__(self, spec: ModelSpec, cache: ContiguousKVCache, mask: torch.Tensor) -> None:
        self.cache, self.mask = cache, mask
        self.windows = layer_windows(spec)

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """query [b, q, h, d], key and value [b, q, h_kv, d] -> [b, q, h, d]."""
        self.cache.write(layer, key, value)
        keys, values = self.cache.read(layer)
        columns = torch.arange(keys.shape[2], device=keys.device)
        queries = columns[-query.shape[1] :, None]
        seen = columns <= queries
        window = self.windows[layer]
        if window is not None:
            seen = seen & (columns > queries - window)
        # A padded query sees only itself: its output is never used, but must not be 0/0.
        seen = seen & self.mask[:, None, :].bool() | (columns == queries)
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2), keys, values, attn_mask=seen[:, None], enable_gqa=True
        )
        return out.transpose(1, 2)


@torch.inference_mode()
def padded_generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    forced: Sequence[Sequence[int]] | None = None,
    on_step: Callable[[torch.Tensor], None] | None = None,
) -> list[list[int]]:
    """Greedy decoding of several prompts in one left-padded batch.

    forced   per prompt, tokens to feed instead of the sampled ones (to compare two runs)
    on_step  called with the logits [batch, vocab] of every forward

    Returns max_new_tokens ids per prompt, or fewer for a prompt that reaches the model's context
    length: each row stops where cached_generate would stop. Its later columns are padding too.
    """
    limit = model.spec.max_position_embeddings
    prompts = [prompt_of(model.spec, prompt) for prompt in prompts]
    budgets = [max_outputs(limit, len(prompt), max_new_tokens) for prompt in prompts]
    token_ids, mask = (rows.to(model.device) for rows in left_pad(prompts))
    num_steps = max(budgets)
    if num_steps < 1:
        return [[] for _ in prompts]
    columns = token_ids.shape[1] + num_steps - 1
    cache = ContiguousKVCache(model.spec, len(prompts), columns, model.dtype, model.device)
    attend = PaddedAttention(model.spec, cache, mask)
    positions = position_rules.padded_positions(mask)
    outputs: list[torch.Tensor] = []
    for step in range(num_steps):
        logits = model.forward(token_ids, positions, attend, rows="last").view(len(prompts), -1)
        cache.advance(token_ids.shape[1])
        token_ids = logits.argmax(-1, keepdim=True)
        outputs.append(token_ids)
        if on_step:
            on_step(logits)
        if forced is not None and step < num_steps - 1:
            token_ids = torch.tensor([[row[step]] for row in forced], device=model.device)
        positions = position_rules.next_positions(attend.mask)
        going_on = positions.new_tensor([[step < budget - 1] for budget in budgets])
        positions = positions - 1 + going_on  # a row that has ended stays at its last position
        attend.mask = torch.cat((attend.mask, going_on), dim=1)
    rows = torch.cat(outputs, dim=1).tolist()
    return [row[:budget] for row, budget in zip(rows, budgets, strict=True)]
