"""The contiguous KV cache: one preallocated K and one V per layer.

    prompt of 6 tokens      write 6 rows into every layer, then advance(6):  length 6
    each decode step        write 1 row  into every layer, then advance(1):  length 7, 8, ...

`write` takes K and V and nothing else: a query is used once, in the step that made it, so
there is nothing of it to keep. K and V of a token depend on the tokens up to it and on no
later one, so what was written stays right for the rest of the run.

ConcatenatedKVCache is the same cache grown with torch.cat, kept for one purpose: to count
what that costs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvlab.errors import KvlabError
from kvlab.specs import ModelSpec

__all__ = ["CacheError", "CacheFull", "ConcatenatedKVCache", "ContiguousKVCache"]


class CacheError(KvlabError):
    """A write or a rollback that does not fit the cache it is asked of."""


class CacheFull(CacheError):
    """The tokens do not fit into what is left of max_len."""


class ContiguousKVCache:
    """K and V of every layer for a batch of sequences that all have the same length.

    spec         the model; layers that cache nothing of their own get no tensors
    batch_size   sequences held side by side
    max_len      tokens each of them can grow to; all of it is allocated here, once
    dtype        of K and V, the model's own as a rule

    Each tensor is [batch_size, num_kv_heads, max_len, head_dim]. h_kv, not h: query heads of
    a group read the same K and V, so nothing is expanded before it is stored.
    """

    def __init__(
        self,
        spec: ModelSpec,
        batch_size: int,
        max_len: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if batch_size < 1 or max_len < 1:
            raise CacheError(
                f"batch_size {batch_size} and max_len {max_len} must both be at least 1"
            )
        for layer in spec.layers:
            if layer.kind not in ("full", "sliding", "chunked"):
                raise CacheError(
                    f"layer kind {layer.kind!r} keeps no plain K and V; this cache serves full, "
                    "sliding and chunked attention layers"
                )
        self.batch_size, self.max_len, self.dtype = batch_size, max_len, dtype
        self.length = 0  # tokens that every layer holds
        shapes = [
            (batch_size, layer.num_kv_heads, max_len, width)
            for side in ("key_dim", "value_dim")
            for layer in spec.layers
            for width in (getattr(layer, side),)
        ]
        self._whole: torch.Tensor | None = None
        if len(set(shapes)) == 1:
            # K of all layers, then V of all: one tensor, whose views take one call for all layers.
            self._whole = torch.zeros(len(shapes), *shapes[0], dtype=dtype, device=device)
            tensors = list(self._whole.unbind())
        else:
            tensors = [torch.zeros(*shape, dtype=dtype, device=device) for shape in shapes]
        self.keys, self.values = tensors[: len(spec.layers)], tensors[len(spec.layers) :]
        self._opened = -1  # tokens of the forward under way, -1 between forwards
        self._slots: list[tuple[torch.Tensor, torch.Tensor]] = []  # a layer's room for K and V
        self._views: list[tuple[torch.Tensor, torch.Tensor]] = []  # and what it reads, with them

    @property
    def nbytes(self) -> int:
        """Bytes allocated, used or not."""
        return sum(tensor.nbytes for tensor in self.keys + self.values)

    @property
    def bytes_copied(self) -> int:
        """Old K and V moved to make room: none, for all the room is there from the start."""
        return 0

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store K and V of t new tokens at positions [length, length + t) of one layer.

        key, value  [batch, t, num_kv_heads, head_dim], K already rotated
        """
        if key.shape[1] != self._opened:
            self._open(key.shape[1])
        slot, value_slot = self._slots[layer]
        if key.requires_grad or value.requires_grad:
            key, value = key.detach(), value.detach()  # values are kept, not what made them
        key, value = key.transpose(1, 2), value.transpose(1, 2)
        if key.shape != slot.shape or value.shape != value_slot.shape:
            for name, rows, room in (("K", key, slot), ("V", value, value_slot)):
                self._require_shape(layer, name, rows, room.shape)
        slot.copy_(key)
        value_slot.copy_(value)

    def _require_shape(
        self, layer: int, name: str, rows: torch.Tensor, room: Sequence[int]
    ) -> None:
        """rows and room are [batch, num_kv_heads, tokens, head_dim]."""
        if rows.shape == room:
            return
        batch, heads, num_new, width = room
        raise CacheError(
            f"layer {layer} was given {name} of shape {tuple(rows.transpose(1, 2).shape)}, "
            f"expected [{batch}, {num_new}, {heads}, {width}] (batch, tokens, KV heads, head_dim). "
            "K and V are stored per KV head: do not repeat them for the query heads."
        )

    def _open(self, num_new: int) -> None:
        """The views of a forward of num_new tokens, made once for all layers."""
        self._require_room(num_new)
        stop = self.length + num_new
        slots: Sequence[torch.Tensor]
        views: Sequence[torch.Tensor]
        if self._whole is not None:
            slots = self._whole.narrow(3, self.length, num_new).unbind()
            views = self._whole.narrow(3, 0, stop).unbind()
        else:
            tensors = self.keys + self.values
            slots = [tensor.narrow(2, self.length, num_new) for tensor in tensors]
            views = [tensor.narrow(2, 0, stop) for tensor in tensors]
        self._pair(slots, views, num_new)

    def _pair(
        self, slots: Sequence[torch.Tensor], views: Sequence[torch.Tensor], num_new: int
    ) -> None:
        """K of all layers, then V, become pairs: a layer past the last finds nothing, not V."""
        half = len(self.keys)
        self._slots = list(zip(slots[:half], slots[half:], strict=True))
        self._views = list(zip(views[:half], views[half:], strict=True))
        self._opened = num_new

    def _require_room(self, num_new: int) -> None:
        if self.length + num_new > self.max_len:
            raise CacheFull(
                f"{num_new} more tokens after {self.length} exceed max_len {self.max_len}; "
                "allocate a longer cache, or drop tokens with truncate_to"
            )

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of K and V, each [batch, num_kv_heads, s, head_dim]; nothing is copied.

        s counts the tokens of the forward under way too, once its first layer has written them.
        """
        if self._opened < 0:
            self._open(0)
        return self._views[layer]

    def advance(self, num_tokens: int) -> None:
        """Close a forward: every layer has written its num_tokens rows."""
        if num_tokens < 0 or self.length + num_tokens > self.max_len:
            raise CacheFull(
                f"cannot advance by {num_tokens} from {self.length} in a cache of {self.max_len}"
            )
        self.length += num_tokens
        self._opened = -1

    def truncate_to(self, length: int) -> None:
        """Keep the first `length` tokens. Rows past them stay in memory and are overwritten."""
        if length < 0:
            raise CacheError(f"cannot keep {length} tokens; to drop from the end use drop_last")
        self.length = min(self.length, length)
        self._opened = -1

    def drop_last(self, num_tokens: int) -> None:
        """Forget the last num_tokens tokens; all of them, if there are fewer."""
        if num_tokens < 0:
            raise CacheError(f"cannot drop {num_tokens} tokens; to keep a prefix use truncate_to")
        self.truncate_to(max(self.length - num_tokens, 0))

    def reset(self) -> None:
        """Forget every token; the memory stays allocated."""
        self.truncate_to(0)


class ConcatenatedKVCache:
    """The same cache without a fixed end: every write makes new tensors with torch.cat.

    bytes_copied counts the old K and V that each torch.cat moved to their new place. The
    closed form is costs.kv_bytes_copied_by_concatenation.
    """

    def __init__(self, spec: ModelSpec, batch_size: int = 1, max_len: int | None = None) -> None:
        self.length = 0
        self.bytes_copied = 0
        self.max_len = max_len
        self.dtype = None  # that of the first write
        self.keys: list[torch.Tensor | None] = [None] * spec.num_layers
        self.values: list[torch.Tensor | None] = [None] * spec.num_layers

    @property
    def nbytes(self) -> int:
        """Bytes of the current tensors; a moment ago the old ones lay beside them."""
        return sum(t.nbytes for t in self.keys + self.values if t is not None)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Append K and V [batch, t, num_kv_heads, head_dim] of t new tokens to one layer."""
        self.keys[layer] = self._append(self.keys[layer], key)
        self.values[layer] = self._append(self.values[layer], value)

    def _append(self, old: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
        new = new.transpose(1, 2)
        if old is None:
            return new.clone(memory_format=torch.contiguous_format)  # never the caller's own
        self.bytes_copied += old.nbytes
        return torch.cat((old, new), dim=2)

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, each [batch, num_kv_heads, s, head_dim]."""
        key, value = self.keys[layer], self.values[layer]
        if key is None or value is None:
            raise CacheError(f"layer {layer} was never written")
        return key, value

    def advance(self, num_tokens: int) -> None:
        """Close a forward of num_tokens tokens."""
        self.length += num_tokens
