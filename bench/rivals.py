"""The loops that are timed against each other: same weights, same prompt, same tokens out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from bench import llamacpp
from kvlab.attention import CachedAttention
from kvlab.cache import ContiguousKVCache
from kvlab.checkpoint import Checkpoint, cache_argument, cache_of, load_with
from kvlab.generate import cached_generate

Generate = Callable[[Sequence[int], int], list[int]]


@dataclass
class Rivals:
    """One checkpoint in one dtype, loaded once for each library."""

    checkpoint: Checkpoint
    reference: LlamaForCausalLM
    dtype: torch.dtype
    folder: Path  # for files that a rival needs, such as a GGUF

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: torch.dtype, folder: Path) -> Rivals:
        reference = load_with(LlamaForCausalLM, checkpoint.folder, dtype)
        config = reference.generation_config
        config.eos_token_id, config.pad_token_id, config.disable_compile = None, 0, True
        return cls(checkpoint, reference, dtype, folder)

    def kvlab(self, prompt: Sequence[int], count: int) -> list[int]:
        """The loop of chapter 2."""
        return cached_generate(self.checkpoint.model, prompt, count)

    def transformers(self, prompt: Sequence[int], count: int, **options) -> list[int]:
        """transformers generate, greedy, with the cache it uses by default (dynamic)."""
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            out = self.reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                **options,
            )
        return out[0, len(prompt) :].tolist()

    def transformers_static(self, prompt: Sequence[int], count: int) -> list[int]:
        """The same with a preallocated cache."""
        return self.transformers(prompt, count, cache_implementation="static")

    def generators(self, threads: int) -> dict[str, Generate]:
        """Every loop there is here, by the name the record uses."""
        loops: dict[str, Generate] = {
            "kvlab": self.kvlab,
            "transformers, dynamic cache": self.transformers,
            "transformers, static cache": self.transformers_static,
        }
        if llamacpp.AVAILABLE:
            loops["llama.cpp"] = llamacpp.generator(
                self.checkpoint, self.dtype, self.folder, threads
            )
        return loops

    def kvlab_step(self, context: int) -> Callable[[], object]:
        """One cached step at a context: the token is written, read, and dropped again."""
        model = self.checkpoint.model
        cache = ContiguousKVCache(model.spec, 1, context, self.dtype)
        for tensor in cache.keys + cache.values:
            tensor.normal_()
        cache.length = context - 1  # as if so many had been written
        attend = CachedAttention(model.spec, cache)
        token, position = torch.tensor([[11]]), torch.tensor([[context - 1]])

        def step() -> object:
            out = model.forward(token, position, attend, "last").argmax(-1)
            cache.truncate_to(context - 1)
            return out

        return step

    def transformers_step(self, context: int) -> Callable[[], object]:
        """The same step through transformers' model and its dynamic cache."""
        with torch.inference_mode():
            ids = torch.full((1, context - 1), 11)
            cache = cache_of(self.reference(ids, logits_to_keep=1))
        token, position = torch.tensor([[11]]), torch.tensor([[context - 1]])
        held = cache_argument(self.reference, cache)

        @torch.inference_mode()
        def step() -> object:
            out = self.reference(token, position_ids=position, **held)
            cache.crop(-1)
            return out.logits[:, -1].argmax(-1)

        return step
