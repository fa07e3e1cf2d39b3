"""The exercise of chapter 2 that needs torch: the write."""

from __future__ import annotations

from typing import Any

import torch

from kvlab.exercises import Exercise, Wrong, register


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
