"""Tiny models for tests: every shape that matters, nothing to download."""

from __future__ import annotations

from kvlab.specs import LayerSpec, ModelSpec, RopeSpec


def tiny_spec(**changes) -> ModelSpec:
    """Three layers, six query heads on two KV heads: 1 < h_kv < h, so tiling them shows."""
    shape = dict(
        name="tiny",
        num_layers=3,
        hidden_size=48,
        num_heads=6,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=64,
        vocab_size=101,
        max_position_embeddings=96,
        tie_word_embeddings=True,
    )
    window = changes.pop("window", None)
    shape.update(changes)
    kv_heads, head_dim = shape["num_kv_heads"], shape["head_dim"]
    kind = "full" if window is None else "sliding"
    layer = LayerSpec(kind, kv_heads, head_dim, head_dim, window)
    shape.setdefault("layers", (layer,) * shape["num_layers"])
    shape.setdefault("rope", RopeSpec(10_000.0, head_dim))
    return ModelSpec(**shape)
