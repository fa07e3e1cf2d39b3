"""Exercises of chapter 2: a cache that is written once a token and never moved."""

from __future__ import annotations

from typing import Any

import torch

from kvlab import costs
from kvlab.configs import preset
from kvlab.exercises import Exercise, Wrong, number, register

_SMOL = preset("smollm2-135m")
_FP32 = 4
_PER_TOKEN = costs.kv_bytes_per_token(_SMOL, _FP32)
_P, _N = 100, 50
_COPIED = costs.kv_bytes_copied_by_concatenation(_SMOL, _P, _N, _FP32)

register(
    Exercise(
        id="2.1",
        title="Bytes of one token",
        question=(
            f"SmolLM2-135M has {_SMOL.num_layers} layers, {_SMOL.num_heads} query heads, "
            f"{_SMOL.num_kv_heads} KV heads and a head size of {_SMOL.head_dim}. How many bytes "
            "does one token take in its cache, in float32?"
        ),
        check=number(
            _PER_TOKEN,
            [
                (_PER_TOKEN // 2, "K and V are both kept; or a float32 has four bytes, not two"),
                (_PER_TOKEN // 4, "a float32 has four bytes, and K and V are both kept"),
                (_PER_TOKEN * 3, "the cache holds KV heads; query heads share them"),
                (_PER_TOKEN // _SMOL.num_layers, "that is one layer"),
                (_PER_TOKEN // _SMOL.head_dim, "each head keeps a vector, not a number"),
                (_PER_TOKEN * 3 // 2, "query heads are not cached, and K and V are both kept"),
            ],
            "layers x 2 (K and V) x KV heads x head size x bytes of a number",
        ),
        solution=_PER_TOKEN,
        hint="Five factors: layers, K and V, KV heads, head size, bytes of a number.",
    )
)

register(
    Exercise(
        id="2.2",
        title="Bytes moved for nothing",
        question=(
            f"The same model in float32, a prompt of {_P} and {_N} decode steps. The cache grows "
            "with torch.cat, which copies what was there at every step. How many bytes of old K "
            "and V do the steps copy?"
        ),
        check=number(
            _COPIED,
            [
                (_COPIED + _N * _PER_TOKEN, "the new token is written, not copied: only what was "
                 "there before is moved"),
                (_N * _P * _PER_TOKEN, "the cache grows: the last copy moves more than the first"),
                ((_P + _N) * _PER_TOKEN, "that is the size at the end; every step copies again"),
                ((_P + _N - 1) * _PER_TOKEN, "that is the last step alone"),
                (_N * (_P + _N - 1) * _PER_TOKEN, "you charged every step like the last"),
                (0, "that is the preallocated cache; torch.cat makes a new tensor every time"),
            ],
            "before step t the cache holds p + t - 1 tokens, and torch.cat copies all of them",
        ),
        solution=_COPIED,
        hint="How many tokens does the cache hold before step t? All of them are copied.",
    )
)


def _check_write(answer: Any) -> None:
    """2.3 asks for write(stored, length, new): stored [h_kv, max_len, d_h], new [t, h_kv, d_h]."""
    if not callable(answer):
        raise Wrong("define the function write(stored, length, new) and pass the function itself")
    generator = torch.Generator().manual_seed(3)
    for length, num_new in ((0, 4), (4, 1), (5, 2)):
        stored = torch.randn(2, 8, 3, generator=generator)
        new = torch.randn(num_new, 2, 3, generator=generator)
        before, address = stored.clone(), stored.data_ptr()
        try:
            returned = answer(stored, length, new)
        except (RuntimeError, IndexError, TypeError) as error:
            raise Wrong(
                f"writing {num_new} tokens after {length} fails: {error}. stored is [h_kv, "
                "max_len, d_h] and new [t, h_kv, d_h]: which axes must change places?"
            ) from None
        if torch.equal(stored, before):
            what = "a new tensor" if isinstance(returned, torch.Tensor) else "nothing"
            raise Wrong(f"stored is unchanged and {what} came back; write into stored, in place")
        assert stored.data_ptr() == address
        place = slice(length, length + num_new)
        if not torch.equal(stored[:, place], new.transpose(0, 1)):
            if torch.equal(stored[:, :num_new], new.transpose(0, 1)):
                raise Wrong("new tokens overwrite the first ones; they go after `length`")
            if torch.equal(stored[:, length], new[-1]):
                raise Wrong("only one of the new tokens is stored; a prompt brings many at once")
            if torch.equal(stored[:, place], new.reshape(2, num_new, 3)):
                raise Wrong(
                    "the numbers are there, in the wrong heads: reshape keeps the order in memory, "
                    "transpose swaps the axes. Shapes agree either way, and nothing else tells"
                )
            raise Wrong(f"rows {length} to {length + num_new - 1} do not hold the new tokens")
        untouched = torch.ones(8, dtype=torch.bool)
        untouched[place] = False
        if not torch.equal(stored[:, untouched], before[:, untouched]):
            raise Wrong("rows of other tokens changed; write only the rows of the new ones")


def _write(stored: torch.Tensor, length: int, new: torch.Tensor) -> None:
    stored[:, length : length + new.shape[0]] = new.transpose(0, 1)


register(
    Exercise(
        id="2.3",
        title="The write",
        question=(
            "Write write(stored, length, new): put the K (or V) of t new tokens, [t, h_kv, d_h], "
            "behind the `length` tokens that stored, [h_kv, max_len, d_h], already holds. In place."
        ),
        check=_check_write,
        solution=_write,
        hint="A slice of the second axis of stored, and new with its first two axes swapped.",
    )
)

_KEEPABLE = {"causal decoder", "encoder output", "cross-attention", "fixed prefix"}
_NAMES = _KEEPABLE | {"growing bidirectional", "query"}
_WHY = {
    "growing bidirectional": "in a bidirectional layer every new token changes what old ones are "
    "from layer 1 on; their K and V are not final",
    "query": "a query is used in the step that made it and by no later one; it could be kept, and "
    "nobody would read it",
    "causal decoder": "in a causal decoder K and V of a token never change once computed",
    "encoder output": "an encoder reads a source that does not grow, so its output is final",
    "cross-attention": "the K and V of cross-attention come from the encoder's output, which is final",
    "fixed prefix": "a prefix may see itself in both directions, as long as nothing later enters it",
}


def _check_keepable(answer: Any) -> None:
    if isinstance(answer, str) or not isinstance(answer, set | frozenset | list | tuple):
        raise Wrong(f"expected a set with some of {sorted(_NAMES)}")
    unknown = set(answer) - _NAMES
    if unknown:
        raise Wrong(f"{sorted(unknown)[0]!r} is none of {sorted(_NAMES)}")
    for name in sorted(set(answer) ^ _KEEPABLE):
        raise Wrong(f"{name}: {_WHY[name]}")


register(
    Exercise(
        id="2.4",
        title="What may be kept",
        question=(
            "Which of these does a cache hold with profit while text is generated: 'causal "
            "decoder' (its K and V), 'growing bidirectional' (K and V of bidirectional layers over "
            "the growing text), 'encoder output', 'cross-attention' (its K and V), 'fixed prefix' "
            "(K and V of a bidirectional prefix), 'query' (of old tokens)? Answer with a set."
        ),
        check=_check_keepable,
        solution=_KEEPABLE,
        hint="Ask of each: does it come out the same at the next step, and will that step read it?",
    )
)
