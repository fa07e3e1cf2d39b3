"""How far a fault carries the real checkpoint away: KL, perplexity, first differing token.

Two runs are fed the same tokens, so that step t compares two next-token distributions after
the same text:

    right   one uncached forward over everything, with every fault suspended
    now     the cached loop as it is, with whatever faults are on

    KL(right || now) = sum over the vocabulary of p (ln p - ln q), in nats; 0 when they agree
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from kvlab.attention import CachedAttention, UncachedAttention
from kvlab.cache import ContiguousKVCache
from kvlab.checkpoint import Checkpoint, load
from kvlab.faults.seams import open_seams, suspended
from kvlab.model import Decoder
from kvlab.rope import RopeTable
from kvlab.specs import LayerSpec, ModelSpec, RopeSpec

#: What the drift laboratory reads. About 500 tokens.
TEXT = """The lighthouse keeper wrote one line in his book every evening. On the first page he \
wrote that the lamp was lit at six and that the sea was calm. On the second page he wrote that a \
boat had passed from the north, that its sail was grey, and that nobody on board had waved. He \
numbered every page in the upper corner, because a line without a number is only a sentence, and \
a sentence can be put anywhere. With a number it becomes a fact about a day.

In winter the wind came through the wall and moved the papers on the table. Once it carried away \
eleven loose pages, and when he had found them all again he could not say in which order they had \
been. The words were all there. He read them aloud, one after the other, and each of them made \
sense, and together they told of a boat that came back before it had left. So he sewed the pages \
together with a sail needle, and from that day he never tore one out.

His daughter came to help him when she was nine years old. She could write, but she started every \
morning with the number one. After a week there were seven pages with the number one, and the \
keeper laughed until he had to sit down. He told her that the number does not say how much she has \
written today. It says how much has been written before, by anyone, since the first evening. She \
thought about this for a long time and then asked what would happen if every number in the book \
were five too large. He looked at the lamp and at the sea. Nothing, he said, as long as we never \
ask which page is the first.

Many years later the lamp was electric and the book was kept by a machine. It counted without \
ever being tired, and it wrote a line every second instead of every day. One night somebody \
changed a single part of it, and from then on each new line was given the number of the next one. \
The lines were correct. The old numbers were correct. Only the step from the old lines to the new \
ones was wrong by one, and the ships that trusted the book began, very slowly, to turn towards \
the land. Nobody saw an error, because there was none to see, and the lamp was burning all the \
time."""


@cache
def checkpoint() -> Checkpoint:
    """The checkpoint in float32, loaded once for all measurements."""
    return load(dtype=torch.float32)


@cache
def text_ids() -> tuple[int, ...]:
    """Token ids of TEXT."""
    return tuple(checkpoint().encode(TEXT))


def with_rope(model: Decoder, rope: RopeSpec, max_seq_len: int | None = None) -> Decoder:
    """The same weights under other rotary settings, as if the config declared them."""
    other = copy.copy(model)
    other.spec = replace(model.spec, rope=rope)
    other.rope = RopeTable(rope, max_seq_len or model.spec.max_position_embeddings, model.device)
    return other


def with_window(model: Decoder, window: int) -> Decoder:
    """The same weights with every layer sliding over `window` tokens."""
    other = copy.copy(model)
    layers: list[LayerSpec] = [
        replace(layer, kind="sliding", window=window) for layer in model.spec.layers
    ]
    other.spec = replace(model.spec, layers=tuple(layers))
    return other


@torch.inference_mode()
def cached_logits(
    model: Decoder,
    token_ids: Sequence[int],
    prompt_len: int,
    *,
    chunk_size: int | None = None,
    kv_cache: ContiguousKVCache | None = None,
    slack: int = 0,
) -> torch.Tensor:
    """The cached loop fed token_ids: logits [steps, vocab] after the prompt and each later token.

    chunk_size  prompt tokens per forward; all at once by default
    kv_cache    one to go on with; a fresh one by default
    slack       rows allocated beyond what is needed
    """
    total = len(token_ids)
    if kv_cache is None:
        kv_cache = ContiguousKVCache(model.spec, 1, total + slack, model.dtype)
    attend = CachedAttention(model.spec, kv_cache)
    tokens, rows, start = torch.tensor([list(token_ids)]), [], 0
    while start < total:
        size = min(chunk_size or prompt_len, prompt_len - start) if start < prompt_len else 1
        stop = start + size
        logits = model.forward(
            tokens[:, start:stop], torch.arange(start, stop)[None], attend, rows="last"
        )
        kv_cache.advance(size)
        start = stop
        if stop >= prompt_len:
            rows.append(logits.reshape(-1))
    return torch.stack(rows)


@torch.inference_mode()
def right_logits(model: Decoder, token_ids: Sequence[int], prompt_len: int) -> torch.Tensor:
    """The same rows from one uncached forward, whatever faults are on outside."""
    with suspended():
        tokens = torch.tensor([list(token_ids)])
        rows = torch.arange(prompt_len - 1, len(token_ids))
        positions = torch.arange(len(token_ids))[None]
        return model.forward(tokens, positions, UncachedAttention(model.spec), rows=rows)


@dataclass(frozen=True)
class Drift:
    """One run set beside the right one, step by step. Step 0 is the end of the prompt.

    kl               KL(right || now) per step, nats
    perplexity       of the text that follows, as this run sees it
    right_perplexity the same for the right run
    first_differing  the first step whose most likely token differs, or None
    """

    kl: tuple[float, ...]
    perplexity: float
    right_perplexity: float
    first_differing: int | None

    @property
    def mean_kl(self) -> float:
        """Average over the steps, nats per token."""
        return sum(self.kl) / len(self.kl)


def compare(right: torch.Tensor, now: torch.Tensor, following: Sequence[int]) -> Drift:
    """Drift between two [steps, vocab] logits.

    following  the token that really comes after each step, [steps] or one fewer
    """
    log_p, log_q = right.double().log_softmax(-1), now.double().log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    targets = torch.tensor(list(following))[:, None]
    rows = slice(0, len(targets))
    differing = (right.argmax(-1) != now.argmax(-1)).nonzero()
    return Drift(
        kl=tuple(kl.tolist()),
        perplexity=math.exp(-log_q[rows].gather(1, targets).mean()),
        right_perplexity=math.exp(-log_p[rows].gather(1, targets).mean()),
        first_differing=int(differing[0]) if len(differing) else None,
    )


_right: dict[tuple, torch.Tensor] = {}
_quiet: dict[tuple, Drift] = {}  # runs with nothing switched on: they always come out the same


def drift(
    model: Decoder | None = None,
    prompt_len: int = 48,
    num_steps: int = 16,
    *,
    chunk_size: int | None = None,
    slack: int = 0,
) -> Drift:
    """The cached loop over the laboratory's text, under whatever faults are on right now.

    model  the checkpoint by default; another of its shape by with_rope or with_window
    """
    model = model or checkpoint().model
    total = prompt_len + num_steps
    ids = text_ids()[: total + 1]
    if len(ids) < total + 1:
        raise ValueError(f"the text has {len(text_ids())} tokens, {total + 1} were asked for")
    key = (model.spec, prompt_len, total)
    quiet_key = (*key, chunk_size, slack)
    if not open_seams() and quiet_key in _quiet:
        return _quiet[quiet_key]
    if key not in _right:
        _right[key] = right_logits(model, ids[:total], prompt_len)
    now = cached_logits(model, ids[:total], prompt_len, chunk_size=chunk_size, slack=slack)
    result = compare(_right[key], now, ids[prompt_len : total + 1])
    if not open_seams():
        _quiet[quiet_key] = result
    return result


#: A decoder small enough to run a detector on in milliseconds. 1 < h_kv < h on purpose.
def tiny_spec() -> ModelSpec:
    """Two layers, six query heads on two KV heads."""
    return ModelSpec(
        name="tiny", num_layers=2, hidden_size=96, num_heads=6, num_kv_heads=2, head_dim=16,
        intermediate_size=64, vocab_size=50, layers=(LayerSpec("full", 2, 16, 16),) * 2,
        tie_word_embeddings=True, max_position_embeddings=1024,
        rope=RopeSpec(10_000.0, 16),
    )  # fmt: skip


@cache
def tiny_model() -> Decoder:
    """tiny_spec with seeded random weights."""
    return Decoder.random(tiny_spec())
