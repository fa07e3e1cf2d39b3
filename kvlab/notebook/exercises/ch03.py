"""Exercises of chapter 3: shapes, and the bytes that follow from them."""

from __future__ import annotations

from collections.abc import Callable

from kvlab import costs
from kvlab.configs import preset
from kvlab.notebook.exercises import function, number

_QWEN, _GEMMA = preset("qwen3-32b"), preset("gemma-3-27b")
_RATE = costs.kv_bytes_per_token(_QWEN)
_FALSE_DIM = _RATE * (_QWEN.hidden_size // _QWEN.num_heads) // _QWEN.head_dim

_N = 32_768
_KEPT = costs.kv_bytes(_GEMMA, _N)
_FULL = costs.kv_bytes(costs.padded_to_full(_GEMMA), _N)
_GROWN = costs.growing_bytes_per_token(_GEMMA) * _N
_CAP = costs.window_cap_bytes(_GEMMA)

_DEEP = preset("deepseek-v3")
_LATENT = costs.kv_bytes_per_token(_DEEP)
_EXPANDED = costs.kv_bytes_per_token(costs.expanded(_DEEP))


def _owners(kv_head: Callable, num_heads: int, num_kv_heads: int) -> list[int]:
    return [kv_head(j, num_heads, num_kv_heads) for j in range(num_heads)]


EXERCISES = [
    number("3.1", "A declared head size",
        f"Qwen3-32B has {_QWEN.num_layers} layers, hidden_size {_QWEN.hidden_size}, "
        f"{_QWEN.num_heads} query heads, {_QWEN.num_kv_heads} KV heads and head_dim "
        f"{_QWEN.head_dim}. How many bytes does one token keep in bf16?",
        _RATE,
        (_FALSE_DIM, "head_dim is declared; hidden_size / heads is a guess, wrong here"),
        (_RATE * _QWEN.num_heads // _QWEN.num_kv_heads, "query heads are not cached"),
        (_RATE // 2, "K and V are both kept, and bf16 has two bytes"),
        (_RATE // _QWEN.num_layers, "that is one layer"),
        (_RATE * 2, "bf16 has two bytes, not four; or K and V were counted twice"),
        otherwise="layers x KV heads x (K width + V width) x bytes of a number",
        hint="The formula has no hidden_size in it.",
    ),
    number("3.2", "A function, not a rate",
        "Gemma-3-27B: of 62 layers 10 attend in full and 52 slide over 1,024 tokens; 16 KV heads "
        f"of 128. How many bytes do {_N:,} tokens of one sequence need in bf16?",
        _KEPT,
        (_FULL, "you charged the windows for the whole context"),
        (_GROWN, "you left the windows out: they are small, not empty"),
        (_CAP, "those are the windows alone"),
        (_GROWN + _CAP * _N // 1024, "a window is full after 1,024 tokens and stays so"),
        (_KEPT // 2, "K and V are both kept, and bf16 has two bytes"),
        otherwise="sum over the layers of rate x min(tokens, window)",
        hint="Two sums: 10 layers x all tokens, 52 layers x at most 1,024.",
    ),
    function("3.3", "Who reads whom",
        "Write kv_head(j, num_heads, num_kv_heads): the KV head that query head j reads.",
        lambda j, num_heads, num_kv_heads: j // (num_heads // num_kv_heads),
        (lambda j, h, kv: j % kv, "that tiles the KV heads 0, 1, 2, 0, 1, 2: a group sits side by "
         "side"),
        (lambda j, h, kv: j, "that gives every query head a KV head of its own: there are fewer"),
        (lambda j, h, kv: j // kv, "you divided by the number of KV heads; divide by a group's "
         "size"),
        cases=[(9, 3), (32, 8), (4, 4), (6, 1)],
        otherwise="with {case[0]} and {case[1]} heads: expected {right}, got {got}",
        signs=[
            (lambda got, *_: set(got) == {None}, "it returns nothing yet: return the number "
             "of a KV head"),
            (lambda got, *_: any(type(i) is not int for i in got), "it gave {got[1]!r}: expected a "
             "whole number; use //, not /"),
            (lambda got, heads, kv: max(got) >= kv and got != list(range(heads)), "{got} has a KV "
             "head that does not exist: there are {case[1]}, from 0 on"),
        ],
        run=_owners,
        fails="it raised {kind} on {case[0]} and {case[1]} heads",
        hint="Query heads that share a KV head sit side by side. How many share one?",
    ),
    number("3.4", "A latent row on eight cards",
        "DeepSeek-V3 keeps one row of 512 + 64 numbers a token in each of 61 layers, for all 128 "
        "heads together. Split over 8 tensor-parallel ranks, how many bytes does one token keep on "
        "each rank, in bf16?",
        _LATENT,
        (_LATENT / 8, "the row belongs to every head, so every rank needs all of it"),
        (2 * _LATENT, "the latent row serves as K and as V: it is kept once"),
        (_LATENT * 512 // 576, "the 64 rotated numbers are kept too"),
        (2 * _LATENT * 512 // 576, "kept once, and the 64 rotated numbers with it"),
        (_EXPANDED, "that is K and V written out for every head"),
        (_EXPANDED / 8, "that is K and V written out, split over the ranks"),
        (8 * _LATENT, "that is all ranks together"),
        otherwise="61 layers x (512 + 64) x 2 bytes, and ask who needs the row",
        hint="Ranks split heads. Which head does the latent row belong to?",
    ),
]
