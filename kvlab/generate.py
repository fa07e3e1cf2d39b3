"""The greedy loops of chapters 1 and 2: every token again, or one token and a cache.

    naive    step t feeds all s = p + t tokens and keeps the last row of logits
    cached   step t feeds one token, at position s - 1, and reads the rest from the cache

Convention: prefill samples the first output; each decode forward samples one more. So n
forwards after prefill give n + 1 outputs, and the last output is never fed back.

Context length: a model with max_position_embeddings = C has positions 0 .. C - 1, and no
forward goes past C - 1. The last output needs no forward of its own, so a prompt of p tokens
yields at most C - p + 1 outputs; a loop asked for more stops there. (An engine that counts
the last output too, as vLLM does with max_model_len, gives C - p.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from kvlab.attention import CachedAttention, UncachedAttention
from kvlab.cache import CacheError, ContiguousKVCache
from kvlab.errors import KvlabError
from kvlab.model import Attend, Decoder
from kvlab.request import RequestError, check_tokens, token_list
from kvlab.specs import ModelSpec

__all__ = [
    "PromptTooLong",
    "Step",
    "cached_generate",
    "max_outputs",
    "naive_generate",
    "prompt_of",
]


class PromptTooLong(KvlabError):
    """The prompt alone does not fit the model's context, or there is no prompt."""


@dataclass(frozen=True)
class Step:
    """What one forward did. t = 0 is the prefill, t = 1, 2, ... the decode steps.

    seq_len    s, tokens known to the model in this forward
    positions  [1, q] of the tokens that were fed
    logits     [vocab], the row that was sampled from
    num_rows   rows of logits computed; all but one are thrown away
    token_id   the sampled token, which the next forward feeds
    """

    t: int
    seq_len: int
    positions: torch.Tensor
    logits: torch.Tensor
    num_rows: int
    token_id: int


def prompt_of(spec: ModelSpec, prompt_ids: Sequence[int]) -> list[int]:
    """The prompt as a list of its own. Raises RequestError unless it is a row of spec's tokens."""
    tokens = token_list(prompt_ids)
    check_tokens(tokens, spec.vocab_size)
    return tokens


def max_outputs(context_length: int | None, prompt_len: int, max_new_tokens: int) -> int:
    """Outputs a loop may produce: the last one is never fed back, so it needs no position."""
    if not isinstance(max_new_tokens, int):
        raise RequestError(f"max_new_tokens={max_new_tokens!r}; expected a whole number")
    if prompt_len < 1 or (context_length is not None and prompt_len > context_length):
        raise PromptTooLong(
            f"the prompt has {prompt_len} tokens; expected between 1 and the model's context "
            f"length of {context_length}"
        )
    if context_length is None:
        return max_new_tokens
    return min(max_new_tokens, context_length - prompt_len + 1)


def _stops(eos: int | Collection[int] | None) -> frozenset[int]:
    if eos is None:
        return frozenset()
    return frozenset({eos} if isinstance(eos, int) else eos)


@torch.inference_mode()
def naive_generate(
    model: Decoder,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    *,
    eos: int | Collection[int] | None = None,
    on_step: Callable[[Step], None] | None = None,
    attend: Attend | None = None,
) -> list[int]:
    """Greedy decoding with no cache: one full forward, and all its rows of logits, per token.

    eos      one id or several that end the run (the id itself is returned too)
    on_step  called after every forward
    attend   in place of UncachedAttention, to count or to break something

    Returns the output ids, without the prompt.
    """
    prompt = prompt_of(model.spec, prompt_ids)
    budget = max_outputs(model.spec.max_position_embeddings, len(prompt), max_new_tokens)
    stops, outputs = _stops(eos), []
    attend = attend or UncachedAttention(model.spec)
    tokens = torch.tensor([prompt], device=model.device)
    for t in range(budget):
        seq_len = tokens.shape[1]
        positions = torch.arange(seq_len, device=model.device).view(1, -1)
        logits = model.forward(tokens, positions, attend)  # [1, s, vocab]
        token = logits[:, -1].argmax(-1, keepdim=True)
        outputs.append(int(token))
        if on_step:
            on_step(Step(t, seq_len, positions, logits[0, -1], logits.shape[1], outputs[-1]))
        if outputs[-1] in stops:
            break
        tokens = torch.cat((tokens, token), dim=1)
    return outputs


@torch.inference_mode()
def cached_generate(
    model: Decoder,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    *,
    eos: int | Collection[int] | None = None,
    on_step: Callable[[Step], None] | None = None,
    cache: ContiguousKVCache | None = None,
    chunk_size: int | None = None,
) -> list[int]:
    """Greedy decoding with a KV cache: the prompt once, then one token per forward.

    cache       an empty one to fill; by default one is allocated for exactly this run. A cache
                that already holds a prefix of the prompt is continued from there.
    chunk_size  feed the prompt in pieces of this many tokens; all at once by default

    Other arguments and the result are those of naive_generate. Nothing is allocated per step
    but the step's own activations: no mask, no positions, no copy of the cache.
    """
    prompt = prompt_of(model.spec, prompt_ids)
    prompt_len = len(prompt)
    budget = max_outputs(model.spec.max_position_embeddings, prompt_len, max_new_tokens)
    if chunk_size is not None and chunk_size < 1:
        raise CacheError(f"chunk_size={chunk_size}; expected 1 or more, or None: all at once")
    if budget < 1:
        return []
    total = prompt_len + budget - 1  # the last output is never fed
    if cache is None:
        cache = ContiguousKVCache(model.spec, 1, total, model.dtype, model.device)
    elif len(cache.keys) != model.spec.num_layers or cache.dtype not in (None, model.dtype):
        raise CacheError(
            f"a cache of {len(cache.keys)} layers in {cache.dtype} given; expected the model's "
            f"{model.spec.num_layers} layers in {model.dtype}: make it from the model's spec"
        )
    attend, stops, outputs = CachedAttention(model.spec, cache), _stops(eos), []
    positions = torch.arange(total, device=model.device).view(1, -1)
    tokens = torch.tensor([prompt], device=model.device)
    start = min(cache.length, prompt_len - 1)  # one token at least must be fed to sample from
    if cache.length > start:
        cache.truncate_to(start)
    chunk = prompt_len if chunk_size is None else chunk_size
    while True:
        if start < prompt_len:
            stop = min(start + chunk, prompt_len)
            fed = tokens[:, start:stop]
        else:
            stop, fed = start + 1, tokens
        logits = model.forward(fed, positions[:, start:stop], attend, rows="last")  # [1, vocab]
        cache.advance(stop - start)
        start = stop
        if stop < prompt_len:
            continue
        tokens = logits.argmax(-1, keepdim=True)  # [1, 1], fed to the next forward as it is
        outputs.append(int(tokens))
        if on_step:
            where = positions[:, stop - fed.shape[1] : stop]
            on_step(Step(len(outputs) - 1, stop, where, logits[0], 1, outputs[-1]))
        if outputs[-1] in stops or len(outputs) == budget:
            return outputs
