"""The contiguous KV cache: one preallocated K and one V per layer.

    prompt of 6 tokens      write 6 rows into every layer, then advance(6):  length 6
    each decode step        write 1 row  into every layer, then advance(1):  length 7, 8, ...

`write` takes K and V and nothing else: a query is used once, in the step that made it, so
there is nothing of it to keep. K and V of a token depend on the tokens up to it and on no
later one, so what was written stays right for the rest of the run.

ConcatenatedKVCache is the same cache grown with torch.cat, kept for one purpose: to count
what that costs. Both answer to the same calls.
"""

from __future__ import annotations

import torch

from kvlab.errors import CacheError, whole
from kvlab.specs import ModelSpec


def check_layers(spec: ModelSpec) -> None:
    """Raise CacheError for a layer that keeps no plain K and V: no cache here can hold it."""
    for index, layer in enumerate(spec.layers):
        if layer.kind not in ("full", "sliding", "chunked"):
            raise CacheError(
                f"layer {index} is of kind {layer.kind!r} and keeps no plain K and V; this cache "
                "serves full, sliding and chunked attention layers"
            )


class KVCache:
    """What every contiguous cache counts: the tokens that all layers hold, and how many may.

    A forward writes its new tokens into every layer and then advances once.
    """

    def __init__(self, max_len: int | None) -> None:
        self.max_len = max_len
        self.length = 0  # tokens that every layer holds
        self.num_written = 0  # tokens of the forward under way, 0 between forwards

    def _begin(self, num_new: int) -> None:
        if self.max_len is not None and self.length + num_new > self.max_len:
            raise CacheError(
                f"{num_new} more tokens after {self.length} exceed max_len {self.max_len}; "
                "allocate a longer cache, or drop tokens with truncate_to"
            )
        self.num_written = num_new

    def advance(self, num_tokens: int) -> None:
        """Close a forward: every layer has written its num_tokens rows."""
        if num_tokens != self.num_written:
            raise CacheError(
                f"cannot advance by {num_tokens}: {self.num_written} tokens were written since the "
                f"last advance()"
            )
        self.length += num_tokens
        self.num_written = 0

    def truncate_to(self, length: int) -> None:
        """Keep the first `length` tokens. What a forward under way has written is dropped."""
        self.length = min(self.length, whole("tokens to keep", length, 0, CacheError))
        self.num_written = 0

    def drop_last(self, num_tokens: int) -> None:
        """Forget the last num_tokens tokens; all of them, if there are fewer."""
        drop = whole("tokens to drop", num_tokens, 0, CacheError)
        self.truncate_to(max(self.length - drop, 0))

    def reset(self) -> None:
        """Forget every token; allocated memory stays."""
        self.truncate_to(0)


class ContiguousKVCache(KVCache):
    """K and V of every layer for a batch of sequences that all have the same length.

    spec         the model; layers that cache nothing of their own are refused
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
        check_layers(spec)
        super().__init__(whole("max_len", max_len, 1, CacheError))
        self.batch_size = whole("batch_size", batch_size, 1, CacheError)
        self.dtype = dtype
        shapes = [
            (batch_size, layer.num_kv_heads, max_len, getattr(layer, side))
            for side in ("key_dim", "value_dim")
            for layer in spec.layers
        ]
        self._whole: torch.Tensor | None = None
        if len(set(shapes)) == 1:
            # K of all layers, then V of all: one tensor, whose views take one call for all layers.
            self._whole = torch.zeros(len(shapes), *shapes[0], dtype=dtype, device=device)
            tensors = list(self._whole.unbind())
        else:
            tensors = [torch.zeros(*shape, dtype=dtype, device=device) for shape in shapes]
        self.keys, self.values = tensors[: len(spec.layers)], tensors[len(spec.layers) :]
        self._views_of = (-1, -1)  # (length, tokens under way) that the views below are right for
        self._slots: list[tuple[torch.Tensor, torch.Tensor]] = []  # a layer's room for new K and V
        self._views: list[tuple[torch.Tensor, torch.Tensor]] = []  # what it reads, them included

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
        if key.shape[1] != self.num_written:
            self._begin(key.shape[1])
        self._open()
        rooms = self._slots[layer]
        new = key.detach().transpose(1, 2), value.detach().transpose(1, 2)
        for name, rows, room in zip("KV", new, rooms, strict=True):
            if rows.shape != room.shape:  # nothing is written, and nothing stretched to fit
                batch, heads, num_new, width = room.shape
                raise CacheError(
                    f"layer {layer} was given {name} of shape {tuple(rows.transpose(1, 2).shape)}, "
                    f"expected [{batch}, {num_new}, {heads}, {width}] (batch, tokens, KV heads, "
                    "head_dim). K and V are stored per KV head: do not repeat them for the query "
                    "heads."
                )
        for rows, room in zip(new, rooms, strict=True):
            room.copy_(rows)

    def _open(self) -> None:
        """The views of a forward, made once for all layers."""
        if self._views_of == (self.length, self.num_written):
            return
        start, new, stop = self.length, self.num_written, self.length + self.num_written
        if self._whole is not None:
            slots = self._whole.narrow(3, start, new).unbind()
            views = self._whole.narrow(3, 0, stop).unbind()
        else:
            slots = tuple(t.narrow(2, start, new) for t in self.keys + self.values)
            views = tuple(t.narrow(2, 0, stop) for t in self.keys + self.values)
        half = len(self.keys)
        self._slots = list(zip(slots[:half], slots[half:], strict=True))
        self._views = list(zip(views[:half], views[half:], strict=True))
        self._views_of = (start, new)

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of K and V, each [batch, num_kv_heads, s, head_dim]; nothing is copied.

        s counts the tokens of the forward under way too, once its first layer has written them.
        """
        self._open()
        return self._views[layer]


class ConcatenatedKVCache(KVCache):
    """The same cache without a room of its own: every write makes new tensors with torch.cat.

    bytes_copied counts the old K and V that each torch.cat moved to their new place. The
    closed form is costs.kv_bytes_copied_by_concatenation.
    """

    def __init__(self, spec: ModelSpec, batch_size: int = 1, max_len: int | None = None) -> None:
        check_layers(spec)
        super().__init__(max_len)
        self.bytes_copied = 0
        self.dtype = None  # that of the first write
        self.keys: list[torch.Tensor | None] = [None] * spec.num_layers
        self.values: list[torch.Tensor | None] = [None] * spec.num_layers

    @property
    def nbytes(self) -> int:
        """Bytes of the current tensors; a moment ago the old ones lay beside them."""
        return sum(t.nbytes for t in self.keys + self.values if t is not None)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Append K and V [batch, t, num_kv_heads, head_dim] of t new tokens to one layer."""
        self._begin(key.shape[1])
        self.keys[layer] = self._append(self.keys[layer], key)
        self.values[layer] = self._append(self.values[layer], value)

    def _append(self, old: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
        new = new.detach().transpose(1, 2)
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

    def truncate_to(self, length: int) -> None:
        """Keep the first `length` tokens, as views of the tensors that hold all of them."""
        super().truncate_to(length)
        for tensors in (self.keys, self.values):
            tensors[:] = [None if t is None or not self.length else t[:, :, : self.length]
                          for t in tensors]  # fmt: skip
