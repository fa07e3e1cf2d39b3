"""Faults of the attention that reads the cache: which head, which keys."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

import kvlab.attention as attention_module
from kvlab.faults import checks
from kvlab.faults.describe import NATS, NOTHING, cache_fault, mean_kl
from kvlab.faults.drift import checkpoint, drift, with_window
from kvlab.faults.registry import register
from kvlab.faults.seams import replaced


def _tiled() -> AbstractContextManager[None]:
    """Query head j reads KV head j % h_kv."""

    def attention(original, query, key, value, **options):
        heads, kv_heads = query.shape[2], key.shape[1]
        j = torch.arange(heads)
        seat = (j % kv_heads) * (heads // kv_heads) + j // kv_heads
        return original(query[:, :, seat.argsort()], key, value, **options)[:, :, seat]

    return replaced(attention_module, "attention", attention)


def _top_left() -> AbstractContextManager[None]:
    """Query i of this step sees keys 0..i, as if it stood at the start of the sequence."""

    def attention(original, query, key, value, **options):
        q = query.shape[1]
        return original(query, key[:, :, :q], value[:, :, :q], **options)

    return replaced(attention_module, "attention", attention)


def _wider_window() -> AbstractContextManager[None]:
    def attention(original, query, key, value, *, scale=None, window=None):
        wider = None if window is None else window + 1
        return original(query, key, value, scale=scale, window=wider)

    return replaced(attention_module, "attention", attention)


def _window_kl() -> float:
    return drift(with_window(checkpoint().model, 16)).mean_kl


register(
    cache_fault(
        "heads_tiled",
        checks.watch_heads,
        mean_kl(),
        symptom="Nonsense from the first token on models with grouped heads; right on models "
        "with one KV head or as many as query heads.",
        smallest_input="h = 4, h_kv = 2, KV head i filled with i: query heads must read "
        "0, 0, 1, 1; tiled they read 0, 1, 0, 1.",
        looks_like=NOTHING,
        detector="Give KV head i the constant value i and look at what each query head returns.",
        cure="Query head j reads KV head j // (h / h_kv): repeat_interleave, not repeat.",
        source="onnx/onnx#7274, apple/axlearn#842, PrimeIntellect-ai/prime-rl#2681",
        switch=_tiled,
    ),
    cache_fault(
        "top_left_mask",
        checks.watch_heads,
        mean_kl(num_steps=8),
        symptom="The prompt is understood, then every decoded token sees only the first key.",
        smallest_input="2 queries on 5 keys: rows must be 1 1 1 1 0 and 1 1 1 1 1; aligned top "
        "left they are 1 0 0 0 0 and 1 1 0 0 0.",
        looks_like=NOTHING + "A prompt fed whole is right: there both alignments agree.",
        detector="Zero scores and one-hot values show which keys each query averages.",
        cure="Queries are the tail of the keys: align the triangle bottom right, and use no "
        "causal flag for a single query.",
        source="pytorch/pytorch#108108, Dao-AILab/flash-attention#517, "
        "Dao-AILab/flash-attention#436, rasbt/LLMs-from-scratch#697, onnx/onnx#8068",
        switch=_top_left,
    ),
    cache_fault(
        "window_off_by_one",
        checks.watch_heads,
        _window_kl,
        symptom="A small loss of quality on sliding-window models, past the window only.",
        smallest_input="Window 3 at position 5: keys 3, 4, 5; the fault also sees 2.",
        looks_like=NOTHING + "Prompts shorter than the window are right.",
        detector="Zero scores and one-hot values show which keys each query averages.",
        cure="A window of W counts the query's own key: keys p - W + 1 to p. In a (left, right) "
        "interface with inclusive left, that is (W - 1, 0).",
        source="ml-explore/mlx-lm#390, NVIDIA-NeMo/Megatron-Bridge#2656, sgl-project/sglang#1056",
        switch=_wider_window,
        unit=NATS + ", a window of 16 declared for the measurement",
        threshold=1e-4,
    ),
)
