"""Exercises of chapter 2: a cache that is written once a token and never moved."""

from __future__ import annotations

from kvlab import costs
from kvlab.configs import preset
from kvlab.notebook.exercises import choice, number

_SMOL = preset("smollm2-135m")
_FP32 = 4
_PER_TOKEN = costs.kv_bytes_per_token(_SMOL, _FP32)
_P, _N = 100, 50
_COPIED = costs.kv_bytes_copied_by_concatenation(_SMOL, _P, _N, _FP32)

_KEEPABLE = {"causal decoder", "cross-attention", "fixed prefix"}
_WHY = {
    "growing bidirectional": "in a bidirectional layer every new token changes what old ones are "
    "from layer 1 on; their K and V are not final",
    "query": "a query is used in the step that made it and by no later one; it could be kept, and "
    "nobody would read it",
    "causal decoder": "in a causal decoder K and V of a token never change once computed",
    "encoder output": "it is final, but steps read the K and V made of it, not the "
    "output",
    "cross-attention": "its K and V come from the encoder's output, which is final",
    "fixed prefix": "a prefix may see itself in both directions, if nothing later enters it",
}

EXERCISES = [
    number("2.1", "Bytes of one token",
        f"SmolLM2-135M has {_SMOL.num_layers} layers, {_SMOL.num_heads} query heads, "
        f"{_SMOL.num_kv_heads} KV heads and a head size of {_SMOL.head_dim}. How many bytes does "
        "one token take in its cache, in float32?",
        _PER_TOKEN,
        (_PER_TOKEN // 2, "K and V are both kept; or a float32 has four bytes, not two"),
        (_PER_TOKEN // 4, "a float32 has four bytes, and K and V are both kept"),
        (_PER_TOKEN * 3, "the cache holds KV heads; query heads share them"),
        (_PER_TOKEN // _SMOL.num_layers, "that is one layer"),
        (_PER_TOKEN // _SMOL.head_dim, "each head keeps a vector, not a number"),
        (_PER_TOKEN * 3 // 2, "query heads are not cached, and K and V are both kept"),
        otherwise="layers x 2 (K and V) x KV heads x head size x bytes of a number",
        hint="Five factors: layers, K and V, KV heads, head size, bytes of a number.",
    ),
    number("2.2", "Bytes moved for nothing",
        f"The same model in float32, a prompt of {_P} and {_N} decode steps. The cache grows with "
        "torch.cat, which copies what was there at every step. How many bytes of old K and V do "
        "the steps copy?",
        _COPIED,
        (_COPIED + _N * _PER_TOKEN, "the new token is written, not copied: only what was there "
         "before is moved"),
        (_N * _P * _PER_TOKEN, "the cache grows: the last copy moves more than the first"),
        ((_P + _N) * _PER_TOKEN, "that is the size at the end; every step copies again"),
        ((_P + _N - 1) * _PER_TOKEN, "that is the last step alone"),
        (_N * (_P + _N - 1) * _PER_TOKEN, "you charged every step like the last"),
        (0, "that is the preallocated cache; torch.cat makes a new tensor every time"),
        otherwise="before step t the cache holds p + t - 1 tokens, and torch.cat copies them all",
        hint="How many tokens does the cache hold before step t? All of them are copied.",
    ),
    choice("2.4", "What may be kept",
        "Which of these does a cache hold with profit while text is generated: 'causal decoder' "
        "(its K and V), 'growing bidirectional' (K and V of bidirectional layers over the growing "
        "text), 'encoder output', 'cross-attention' (its K and V), 'fixed prefix' (K and V of a "
        "bidirectional prefix), 'query' (of old tokens)? Answer with a set.",
        _KEEPABLE,
        why=_WHY,
        names=str(sorted(_WHY)),
        hint="Ask of each: does it come out the same whenever it is needed again, and is it needed "
        "again?",
    ),
]
