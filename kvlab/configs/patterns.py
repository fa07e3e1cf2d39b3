"""Which layer attends how: the pattern that a config states, or that its model type implies.

The result is one word a layer: "full", "sliding", "chunked", "recurrent" or "none"; a layer that
attends and also carries a recurrent state is "full+" or "sliding+". A list in the file wins; then
a pattern key; then what the model type means by saying nothing; then one sliding_window for all.
"""

from __future__ import annotations

from kvlab.configs.fields import Fields, show
from kvlab.configs.rules import (
    ALL_RECURRENT,
    ATTENDS_AT,
    GATED,
    IMPLIED,
    INDEXED,
    KIND_OF,
    LETTERS,
    NEEDS_A_LIST,
    NO_WINDOW,
    every_nth_full,
)


def layer_kinds(fields: Fields, num_layers: int) -> list[str]:
    """One word for each of num_layers layers; the sources of a pattern in order of authority."""
    for source in (_listed, _lettered, _flagged, _indexed, _periodic):
        kinds = source(fields, num_layers)
        if kinds is not None:
            return _gate(fields, kinds)
    if fields.model_type in ALL_RECURRENT:
        return ["recurrent"] * num_layers
    if fields.model_type in NEEDS_A_LIST:
        raise fields.fail(
            "layer_types",
            f"missing; expected a list of layers, or hybrid_override_pattern, since "
            f"{fields.model_type} implies none; add it",
        )
    rule = IMPLIED.get(fields.model_type)
    if rule is not None:
        kinds = [rule(i, num_layers) for i in range(num_layers)]
        fields.note(f"no key says which layer attends how; {fields.model_type} implies it")
        return _gate(fields, kinds)
    return _one_window(fields, num_layers)


def _listed(fields: Fields, num_layers: int) -> list[str] | None:
    words = fields.items("layer_types")
    if words is None:
        return None
    extra = fields.count("num_nextn_predict_layers", 0) or 0
    if extra and len(words) == num_layers + extra:
        words = words[:num_layers]
        fields.note(f"layer_types lists {extra} MTP layers at its end; they are counted apart")
    if len(words) != num_layers:
        raise fields.fail(
            "layer_types",
            f"has {len(words)} entries, but num_hidden_layers is {num_layers}; expected one entry "
            f"a layer; correct one of them",
        )
    for word in words:
        if not isinstance(word, str) or word not in KIND_OF:
            raise fields.fail(
                "layer_types",
                f"given {show(word)}; expected names such as full_attention, sliding_attention, "
                f"linear_attention; this kind of layer is not modelled",
            )
    if any(word in INDEXED for word in words):
        fields.note(
            "an indexer's own keys, stored beside the cache by some engines, are not counted"
        )
    if fields.raw("sliding_window_pattern") is not None:
        fields.note("layer_types decides; sliding_window_pattern is not used")
    kinds = [KIND_OF[word] for word in words]
    if fields.model_type == "gemma4_text" and kinds[-1] == "sliding":
        kinds[-1] = "full"
        fields.note("gemma4 attends in full on its last layer whatever layer_types says")
    return kinds


def _lettered(fields: Fields, num_layers: int) -> list[str] | None:
    pattern = fields.raw("hybrid_override_pattern")
    if pattern is None:
        return None
    if not isinstance(pattern, str) or set(pattern) - set(LETTERS):
        raise fields.fail(
            "hybrid_override_pattern",
            f"given {show(pattern)}; expected one letter a layer out of M (Mamba), E or - (no "
            f"attention), * (attention)",
        )
    if len(pattern) != num_layers:
        raise fields.fail(
            "hybrid_override_pattern",
            f"has {len(pattern)} letters, but num_hidden_layers is {num_layers}; correct one",
        )
    return [LETTERS[letter] for letter in pattern]


def _flagged(fields: Fields, num_layers: int) -> list[str] | None:
    """Lists of 0 and 1, one a layer."""
    for key, words in (
        ("attn_type_list", ("recurrent", "full")),
        ("hybrid_layer_pattern", ("full", "sliding")),
        ("sliding_window_layout", ("full", "sliding")),
        ("no_rope_layers", ("full", "chunked")),
    ):
        if key == "no_rope_layers" and fields.model_type != "llama4_text":
            continue  # elsewhere it says only which layers are rotated
        if not fields.items(key):
            continue
        flags = fields.items(key, num_layers) or []
        for flag in flags:
            if isinstance(flag, bool) or flag not in (0, 1):
                raise fields.fail(key, f"given {show(flag)}; expected 0 or 1 for each layer")
        return [words[flag] for flag in flags]
    return None


def _indexed(fields: Fields, num_layers: int) -> list[str] | None:
    """Lists of layer indices; the layers named attend one way and all others another way."""
    linear = fields.block("linear_attn_config")
    places = [
        ("attn_layer_indices", fields.raw("attn_layer_indices"), 0, "full", "recurrent"),
        ("full_attn_idxs", fields.raw("full_attn_idxs"), 0, "full", "recurrent"),
        ("local_layer_ids", fields.raw("local_layer_ids"), 0, "sliding+", "full+"),
        (
            "linear_attn_config.full_attn_layers",
            linear.get("full_attn_layers"),
            1,
            "full",
            "recurrent",
        ),
    ]
    for key, value, base, named, others in places:
        if value is None:
            continue
        if not isinstance(value, list | tuple):
            raise fields.fail(key, f"given {show(value)}; expected a list of layer numbers")
        chosen = {fields.check_count(key, i, base, num_layers - 1 + base) for i in value}
        return [named if i + base in chosen else others for i in range(num_layers)]
    return None


def _periodic(fields: Fields, num_layers: int) -> list[str] | None:
    """A period, or a short word that repeats."""
    blocks = fields.items("block_types")
    if blocks:
        attends = "sliding" if fields.model_type == "recurrent_gemma" else "full"
        words = {"recurrent": "recurrent", "attention": attends}
        bad = [b for b in blocks if not isinstance(b, str) or b not in words]
        if bad:
            raise fields.fail(
                "block_types", f"given {show(bad[0])}; expected recurrent or attention"
            )
        return [words[blocks[i % len(blocks)]] for i in range(num_layers)]
    pattern = fields.raw("sliding_window_pattern")
    if isinstance(pattern, str):
        if not pattern or set(pattern) - set("LG"):
            raise fields.fail(
                "sliding_window_pattern", f"given {show(pattern)}; expected a number or LLLG"
            )
        letters = {"L": "sliding", "G": "full"}
        return [letters[pattern[i % len(pattern)]] for i in range(num_layers)]
    for key, other, first in (
        ("sliding_window_pattern", "sliding", None),
        ("global_attn_every_n_layers", "sliding", 0 if "bert" in fields.model_type else None),
        ("full_attention_interval", "recurrent", None),
        ("layer_group_size", "recurrent", None),
        ("no_rope_layer_interval", "chunked", None),
    ):
        if key == "no_rope_layer_interval" and fields.model_type != "llama4_text":
            continue
        if key == "sliding_window_pattern" and not _has_window(fields):
            continue
        n = fields.count(key)
        if n is not None:
            rule = every_nth_full(n, other, first)
            return [rule(i, num_layers) for i in range(num_layers)]
    period = fields.count("attn_layer_period")
    if period is not None:
        offset = fields.count("attn_layer_offset", 0)
        if offset is None:
            offset = ATTENDS_AT.get(fields.model_type, 0)
            fields.note(f"attn_layer_offset is not in the file; {offset} is assumed")
        if offset >= period:
            raise fields.fail(
                "attn_layer_offset",
                f"given {offset}; expected less than attn_layer_period {period}",
            )
        named, shift = ("full+", 3) if fields.model_type == "zamba" else ("full", 0)
        kinds = [
            named if i >= shift and (i - shift) % period == offset else "recurrent"
            for i in range(num_layers)
        ]
        if shift and num_layers > 2:
            kinds[2] = "full+"
        return kinds
    return None


def _has_window(fields: Fields) -> bool:
    return fields.declared("sliding_window") and fields.raw("sliding_window") is not None


def _null(fields: Fields, key: str) -> bool:
    """True where the file names the field and switches it off with null or 0."""
    return fields.declared(key) and not fields.count(key, 0)


def _gate(fields: Fields, kinds: list[str]) -> list[str]:
    """Take the windows away where the file switches them off; refuse a file that says both."""
    if "chunked" in kinds and _null(fields, "attention_chunk_size"):
        fields.note("attention_chunk_size is null, so the layers of the pattern attend in full")
        return [kind.replace("chunked", "full") for kind in kinds]
    if not any(kind.startswith("sliding") for kind in kinds):
        return kinds
    if fields.flag("use_sliding_window") is False:
        raise fields.fail(
            "use_sliding_window",
            "given false, but the layer pattern names sliding layers; expected one or the other; "
            "correct the pattern or the switch",
        )
    if _null(fields, "sliding_window") and fields.model_type != "modernbert-decoder":
        fields.note("sliding_window is null, so the layers of the pattern attend in full")
        return [kind.replace("sliding", "full") for kind in kinds]
    return kinds


def _one_window(fields: Fields, num_layers: int) -> list[str]:
    """No pattern at all: one sliding_window for all layers, Qwen's gates, or full attention."""
    chunk, window = fields.count("attention_chunk_size", 0), fields.count("sliding_window", 0)
    gate = fields.flag("use_sliding_window")
    if window is None and gate and not fields.declared("sliding_window"):
        window = fields.defaults.get("sliding_window")
    if not window or fields.model_type in NO_WINDOW:
        if chunk:
            return ["chunked"] * num_layers
        if "sliding_window" in fields.defaults and not fields.declared("sliding_window"):
            fields.note("sliding_window is not in the file; read as full attention on every layer")
        return ["full"] * num_layers
    if gate is False or (gate is None and fields.model_type in GATED):
        fields.note("sliding_window is given but use_sliding_window does not switch it on")
        return ["full"] * num_layers
    if fields.model_type == "qwen2_moe":
        limit = fields.count("max_window_layers", 0)
        limit = 28 if limit is None else limit
        return ["sliding" if i % 2 == 0 and i < limit else "full" for i in range(num_layers)]
    if fields.model_type == "smollm3":
        rotated = fields.items("no_rope_layers", num_layers)
        every = fields.count("no_rope_layer_interval") or 4
        rotated = rotated or [int((i + 1) % every != 0) for i in range(num_layers)]
        return ["full" if flag else "sliding" for flag in rotated]
    first = fields.count("max_window_layers", 0)
    if first is None and fields.model_type in GATED and fields.model_type != "qwen3_moe":
        first = 80 if fields.model_type in ("qwen2_vl_text", "qwen2_5_vl_text") else 28
        fields.note(f"max_window_layers is not in the file; {fields.model_type} means {first}")
    if fields.model_type == "qwen3_moe":
        first = 0
    fields.note("one sliding_window and no pattern: it holds on every layer that is not gated")
    return ["sliding" if i >= (first or 0) else "full" for i in range(num_layers)]
