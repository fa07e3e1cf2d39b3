"""A contiguous cache whose sliding-window layers keep no more than their window.

    window 8, position p goes to column p % 8: the newcomer overwrites what just left the window

    after 6 tokens   0 1 2 3 4 5 . .
    after 8          0 1 2 3 4 5 6 7
    after 10         8 9 2 3 4 5 6 7      positions 0 and 1 are gone

K is rotated before it is written, so a single query may read the columns in any order: attention
is a sum over them. A chunk of several queries is another matter. Its first query still needs keys
that its last one would overwrite, so the chunk is attended to beside the old columns, in order,
and only then rolled in.
"""

from __future__ import annotations

import torch

from kvlab.cache import CacheError, ContiguousKVCache
from kvlab.specs import ModelSpec

__all__ = ["RollbackTooFar", "RollingKVCache"]


class RollbackTooFar(CacheError):
    """Rolling back would need keys that the window has already overwritten."""


class RollingKVCache(ContiguousKVCache):
    """ContiguousKVCache with a ring of `window + rollback` columns in every sliding layer.

    rollback   tokens that drop_last can take back once the ring is full (speculative decoding)
    """

    def __init__(
        self,
        spec: ModelSpec,
        batch_size: int,
        max_len: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        rollback: int = 0,
    ) -> None:
        if rollback < 0:
            raise CacheError(f"rollback {rollback}: expected 0 or more tokens")
        super().__init__(spec, batch_size, 1, dtype, device)  # the shapes; columns come below
        self.max_len, self.rollback = max_len, rollback
        if max_len < 1:
            raise CacheError(f"max_len {max_len} must be at least 1")
        self.windows = [layer.window for layer in spec.layers]
        self.highest = 0  # tokens ever counted since the last reset
        self._written = [0] * len(self.windows)  # of each ring, also by a forward never closed
        for layer, window in enumerate(self.windows):
            columns = max_len if window is None else min(max_len, window + rollback)
            for tensors in (self.keys, self.values):
                batch, heads, _, width = tensors[layer].shape
                tensors[layer] = tensors[layer].new_zeros(batch, heads, columns, width)
        self._in_flight: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def num_columns(self, layer: int) -> int:
        """Tokens that a layer holds: the length, or its window once that is full."""
        window = self.windows[layer]
        return self.length if window is None else min(self.length, window)

    def _columns(self, layer: int, start: int, stop: int) -> torch.Tensor:
        size = self.keys[layer].shape[2]
        return torch.arange(start, stop, device=self.keys[layer].device) % size

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store K and V [batch, t, num_kv_heads, head_dim] of t new tokens of one layer.

        Raises CacheFull, CacheError, or RollbackTooFar after a forward that broke off.
        """
        window = self.windows[layer]
        num_new = key.shape[1]
        if window is None or self.length + num_new > self.max_len:
            super().write(layer, key, value)  # or its named errors
            return
        if key.requires_grad or value.requires_grad:
            key, value = key.detach(), value.detach()
        stored = (self.keys[layer], self.values[layer])
        new = (key.transpose(1, 2), value.transpose(1, 2))
        for name, rows, ring in zip("KV", new, stored, strict=True):
            batch, heads, _, width = ring.shape
            self._require_shape(layer, name, rows, (batch, heads, num_new, width))
        oldest = max(0, self._written[layer] - stored[0].shape[2])
        if max(0, self.length - window + 1) < min(oldest, self.length):
            raise RollbackTooFar(
                f"layer {layer} was written up to position {self._written[layer] - 1} by a forward "
                f"that was never closed, over keys which position {self.length} needs: reset() "
                "and compute the prefix again"
            )
        self._in_flight.pop(layer, None)
        if num_new > 1:
            old = self._columns(layer, max(0, self.length - window + 1), self.length)
            kept, added = (
                torch.cat((ring.index_select(2, old), rows.to(ring.dtype)), dim=2)
                for ring, rows in zip(stored, new, strict=True)
            )
            self._in_flight[layer] = (kept, added)
        stop = self.length + num_new
        start = max(self.length, stop - stored[0].shape[2])
        columns = self._columns(layer, start, stop)
        for ring, rows in zip(stored, new, strict=True):
            ring.index_copy_(2, columns, rows[:, :, start - self.length :].to(ring.dtype))
        self._written[layer] = max(self._written[layer], stop)
        if num_new != self._opened:
            self._open(num_new)

    def _open(self, num_new: int) -> None:
        """Views of the full layers; a ring's columns are looked up when it is written or read."""
        self._require_room(num_new)
        stop, tensors = self.length + num_new, self.keys + self.values
        full = [window is None for window in self.windows] * 2
        pairs = list(zip(tensors, full, strict=True))
        slots = [t.narrow(2, self.length, num_new) if whole else t for t, whole in pairs]
        self._pair(slots, [t.narrow(2, 0, stop) if whole else t for t, whole in pairs], num_new)

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [batch, num_kv_heads, s, head_dim] that the forward under way may need.

        A single query's columns come in any order. A chunk's come in order: the window - 1
        tokens before it, then the chunk.
        """
        window = self.windows[layer]
        if window is None:
            return super().read(layer)
        if layer in self._in_flight:
            return self._in_flight[layer]
        stop = self.length + max(self._opened, 0)
        key, value = self.keys[layer], self.values[layer]
        if stop <= key.shape[2]:
            start = max(0, stop - window)
            return key[:, :, start:stop], value[:, :, start:stop]
        if key.shape[2] == window:
            return key, value
        columns = self._columns(layer, stop - window, stop)
        return key.index_select(2, columns), value.index_select(2, columns)

    def advance(self, num_tokens: int) -> None:
        """Close a forward: every layer has written its num_tokens rows."""
        super().advance(num_tokens)
        self.highest = max(self.highest, self.length)
        self._in_flight = {}

    def truncate_to(self, length: int) -> None:
        """Keep the first `length` tokens.

        Raises RollbackTooFar if the next token would have to see overwritten keys: those of
        positions before highest - window - rollback are gone.
        """
        for layer, window in enumerate(self.windows):
            if window is None or length <= 0 or length >= self.length:
                continue
            highest = max(self.highest, self._written[layer])
            oldest = max(0, highest - self.keys[layer].shape[2])
            if max(0, length - window + 1) < min(oldest, length):
                raise RollbackTooFar(
                    f"cannot go back from {self.length} to {length} tokens: layer {layer} has "
                    f"window {window} and kept positions {oldest} and later. Allow for it with "
                    f"rollback={highest - length - 1} or more, or compute the prefix again"
                )
        super().truncate_to(length)
        self._in_flight = {}
        if length <= 0:
            self.highest, self._written = 0, [0] * len(self.windows)
