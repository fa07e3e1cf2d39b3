"""Which layer attends how: the pattern that a config states, or that its model type implies.

The result is one word a layer: "full", "sliding", "chunked", "recurrent" or "none"; a layer that
attends and also carries a recurrent state is "full+" or "sliding+". A list in the file wins; then
a pattern key; then what the model type means by saying nothing; then one sliding_window for all.
"""

from __future__ import annotations

from kvlab.configs.fields import MOST_LAYERS, Fields, model_types

#: The letters of a pattern in data/model_types.json.
LETTERS = {"F": "full", "S": "sliding", "C": "chunked", "R": "recurrent", "f": "full+",
           "s": "sliding+"}  # fmt: skip


def count_layers(fields: Fields) -> int:
    """num_hidden_layers, or the length of the list of layers where only that is given."""
    if fields.model_type.startswith("longcat_flash"):
        fields.note(f"{fields.model_type}: two attention layers in each of num_layers blocks")
        blocks = fields.as_count("num_layers", fields.data.get("num_layers"), 1, MOST_LAYERS)
        total = fields.count("num_hidden_layers", 1, MOST_LAYERS)
        if blocks is not None and total not in (None, blocks, 2 * blocks):
            fields.fail("num_layers", f"given {blocks}, but num_hidden_layers is {total}")
        if blocks is not None:
            return 2 * blocks
    listed = fields.raw("layer_types") or fields.raw("hybrid_override_pattern")
    count = fields.count("num_hidden_layers", 1, MOST_LAYERS)
    if count is None and isinstance(listed, list | tuple | str) and 0 < len(listed) <= MOST_LAYERS:
        fields.note("num_hidden_layers is not in the file; the layer list's length is taken")
        return len(listed)
    return fields.needed("num_hidden_layers", why="the number of layers", most=MOST_LAYERS)


def layer_kinds(fields: Fields, num_layers: int) -> list[str]:
    """One word for each of num_layers layers; the sources of a pattern in order of authority."""
    if fields.model_type == "deepseek_v4":  # its ratios say the rest: see _compressed
        return ["sliding"] * num_layers
    for source in (_listed, _lettered, _flagged, _numbered, _periodic, _implied, _one_window):
        kinds = source(fields, num_layers)
        if kinds is not None:
            break
    assert kinds is not None, "the last source always answers"
    kinds = _switched_off(fields, kinds)
    _refuse_unplaced(fields, kinds)
    crossed = fields.items("cross_attention_layers")
    if not crossed:
        return kinds
    numbers = {fields.as_count("cross_attention_layers", i, 0, num_layers - 1) for i in crossed}
    kept = "cross-attention layers keep K and V of the image only"
    fields.note(f"{len(numbers)} {kept}; not counted")
    return ["none" if i in numbers else kind for i, kind in enumerate(kinds)]


def windows(fields: Fields, kinds: list[str]) -> dict[str, int]:
    """How far layers of a kind look back, in tokens, their own included."""
    found = {}
    if any(kind.startswith("sliding") for kind in kinds):
        found["sliding"] = _window(fields)
    if "chunked" in kinds:
        why = "the width of the chunked layers"
        fields.note(
            "chunked layers: an upper bound; when a finished chunk is freed is the engine's choice"
        )
        found["chunked"] = fields.needed("attention_chunk_size", why=why)
    return found


def _window(fields: Fields) -> int:
    why = "the width of the sliding layers"
    if fields.model_type == "modernbert-decoder" and fields.raw("sliding_window") is None:
        return fields.needed("local_attention", why=why, least=2) // 2
    if fields.model_type == "mimo_v2_flash":
        reach = fields.as_count("sliding_window_size", fields.data.get("sliding_window_size"))
        if reach is not None:
            fields.note(
                f"sliding_window_size {reach} leaves the current token out: {reach + 1} keys"
            )
            return reach + 1
    return fields.needed("sliding_window", why=why)


# --- the sources of a pattern, first to last: a list of words, or None where it is silent --------


def _listed(fields: Fields, num_layers: int) -> list[str] | None:
    words = fields.items("layer_types")
    if words is None:
        return None
    extra = fields.count("num_nextn_predict_layers", 0) or 0
    if extra and len(words) == num_layers + extra:
        words = words[:num_layers]
        fields.note(f"layer_types lists {extra} MTP layers at its end; they are counted apart")
    fields.one_a_layer("layer_types", words, num_layers)
    names = "names such as full_attention, sliding_attention, linear_attention"
    expected = f"{names}; this kind of layer is not modelled"
    kind_of = model_types()["facts"]["layer_kind"]
    for word in words:
        known = isinstance(word, str) and word in kind_of
        fields.check("layer_types", word, known, expected)
    if any(word in model_types()["indexed_layers"] for word in words):
        pooled = " (pooled here: not counted)" * ((fields.count("index_kpool") or 1) > 1)
        fields.note(f"an indexer's own keys are no part of K and V: a line of their own{pooled}")
    if fields.raw("sliding_window_pattern") is not None:
        fields.note("layer_types decides; sliding_window_pattern is not used")
    kinds = [kind_of[word] for word in words]
    if fields.model_type == "gemma4_text" and kinds[-1] == "sliding":
        kinds[-1] = "full"
        fields.note("gemma4 attends in full on its last layer whatever layer_types says")
    return kinds


def _lettered(fields: Fields, num_layers: int) -> list[str] | None:
    """One letter a layer, as Nemotron-H and its kin write it."""
    key = "hybrid_override_pattern"
    letters = {"M": "recurrent", "E": "none", "-": "none", "*": "full"}
    pattern = fields.raw(key)
    if pattern is None:
        return None
    known = isinstance(pattern, str) and set(pattern) <= set(letters)
    expected = "one letter a layer out of M (Mamba), E or - (no attention), * (attention)"
    fields.check(key, pattern, known, expected)
    fields.one_a_layer(key, pattern, num_layers)
    return [letters[letter] for letter in pattern]


def _of_another_type(fields: Fields, key: str) -> bool:
    """Whether a key speaks of windows only in a model type other than this."""
    return model_types()["key_of_one_type"].get(key, fields.model_type) != fields.model_type


def _flagged(fields: Fields, num_layers: int) -> list[str] | None:
    for key, words in model_types()["flag_lists"].items():
        if _of_another_type(fields, key) or not fields.items(key):
            continue
        flags = fields.items(key, num_layers) or []
        for flag in flags:
            fields.check(key, flag, type(flag) is int and flag in (0, 1), "0 or 1 for each layer")
        return [words[flag] for flag in flags]
    return None


def _numbered(fields: Fields, num_layers: int) -> list[str] | None:
    linear = fields.block("linear_attn_config")
    for key, (base, named, others) in model_types()["number_lists"].items():
        value = linear.get("full_attn_layers") if "." in key else fields.raw(key)
        if value is None:
            continue
        fields.check(key, value, isinstance(value, list | tuple), "a list of layer numbers")
        chosen = {fields.as_count(key, i, base, num_layers - 1 + base) for i in value}
        return [named if i + base in chosen else others for i in range(num_layers)]
    return None


def _periodic(fields: Fields, num_layers: int) -> list[str] | None:
    """A short list that repeats, or a period."""
    if blocks := fields.items("block_types"):
        attends = "sliding" if fields.model_type == "recurrent_gemma" else "full"
        words = {"recurrent": "recurrent", "attention": attends}
        for block in blocks:
            known = isinstance(block, str) and block in words
            fields.check("block_types", block, known, "recurrent or attention")
        return [words[blocks[i % len(blocks)]] for i in range(num_layers)]
    pattern = fields.raw("sliding_window_pattern")
    if isinstance(pattern, str):
        known = bool(pattern) and set(pattern) <= set("LG")
        fields.check("sliding_window_pattern", pattern, known, "a number or LLLG")
        kind_of = {"L": "sliding", "G": "full"}
        return [kind_of[pattern[i % len(pattern)]] for i in range(num_layers)]
    for key, others in model_types()["periods"].items():
        if _of_another_type(fields, key):
            continue
        if key == "sliding_window_pattern" and fields.raw("sliding_window") is None:
            continue
        n = fields.count(key)
        if n is not None:
            first = key == "global_attn_every_n_layers" and "bert" in fields.model_type
            return _every(n, 0 if first else n - 1, num_layers, "full", others)
    period = fields.count("attn_layer_period")
    if period is None:
        return None
    offset = fields.count("attn_layer_offset", 0)
    if offset is None:
        offset = 4 if fields.model_type in ("jamba", "zamba") else 0
        fields.note(f"attn_layer_offset is not in the file; {offset} is assumed")
    expected = f"less than attn_layer_period {period}"
    fields.check("attn_layer_offset", offset, offset < period, expected)
    if fields.model_type == "zamba":  # its period starts at its fourth layer
        start = ["recurrent", "recurrent", "full+"]
        return (start + _every(period, offset, num_layers, "full+", "recurrent"))[:num_layers]
    return _every(period, offset, num_layers, "full", "recurrent")


def _every(n: int, at: int, num_layers: int, named: str, others: str) -> list[str]:
    """Of every n layers the one at `at` (from 0) is named; the others are not."""
    return [named if i % n == at else others for i in range(num_layers)]


def _implied(fields: Fields, num_layers: int) -> list[str] | None:
    """What the model type means when no key says which layer attends how."""
    model_type = fields.model_type
    if fields.fact("all_recurrent"):
        return ["recurrent"] * num_layers
    if model_type == "nemotron_h":
        expected = f"a list of layers, or hybrid_override_pattern, since {model_type} implies none"
        fields.fail("layer_types", f"missing; expected {expected}; add it")
    pattern = fields.fact("pattern")
    if pattern is None:
        return None
    fields.note(f"no key says which layer attends how; {model_type} implies it")
    first, _, cycle = pattern.rpartition("|")
    kinds = [LETTERS[letter] for letter in first + cycle * num_layers]
    kinds = kinds[-num_layers:] if fields.fact("from_the_end") else kinds[:num_layers]
    if fields.fact("last_in_full") or (model_type == "olmo_hybrid" and num_layers < 4):
        kinds[-1] = "full"
    return kinds


def _one_window(fields: Fields, num_layers: int) -> list[str]:
    """No pattern at all: one sliding_window for all layers, Qwen's gates, or full attention."""
    chunk, window = fields.count("attention_chunk_size", 0), fields.count("sliding_window", 0)
    model_type, silent = fields.model_type, not fields.declared("sliding_window")
    gate, gated_from = fields.flag("use_sliding_window"), fields.fact("gated")
    if window is None and gate and silent:
        window = fields.defaults.get("sliding_window")
    if not window or fields.fact("no_window"):
        if chunk:
            return ["chunked"] * num_layers
        if silent and "sliding_window" in fields.defaults:
            fields.note("sliding_window is not in the file; read as full attention on every layer")
        return ["full"] * num_layers
    if gate is False or (gate is None and gated_from is not None):
        fields.note("sliding_window is given but use_sliding_window does not switch it on")
        return ["full"] * num_layers
    if model_type == "smollm3":
        every = fields.count("no_rope_layer_interval") or 4
        rotated = fields.items("no_rope_layers", num_layers)
        rotated = rotated or [(i + 1) % every for i in range(num_layers)]
        return ["full" if flag else "sliding" for flag in rotated]
    stated = fields.count("max_window_layers", 0)
    first = gated_from if stated is None or model_type == "qwen3_moe" else stated
    if model_type == "qwen2_moe":
        return ["sliding" if i % 2 == 0 and i < first else "full" for i in range(num_layers)]
    if stated is None and gated_from:
        fields.note(f"max_window_layers is not in the file; {model_type} means {first}")
    fields.note("one sliding_window and no pattern: it holds on every layer that is not gated")
    return ["sliding" if i >= (first or 0) else "full" for i in range(num_layers)]


# --- what undoes a pattern, or makes it unreadable ----------------------------------------------


def _switched_off(fields: Fields, kinds: list[str]) -> list[str]:
    """Take the windows away where the file switches them off; refuse a file that says both."""
    sliding = any(kind.startswith("sliding") for kind in kinds)
    if sliding and fields.flag("use_sliding_window") is False:
        named = "the layer pattern names sliding layers; expected one or the other"
        correct = "correct the pattern or the switch"
        fields.fail("use_sliding_window", f"given false, but {named}; {correct}")
    for kind, key in (("chunked", "attention_chunk_size"), ("sliding", "sliding_window")):
        if not any(other.startswith(kind) for other in kinds):
            continue
        null = fields.declared(key) and not fields.count(key, 0)
        if null and not (kind == "sliding" and fields.model_type == "modernbert-decoder"):
            fields.note(f"{key} is null, so the layers of the pattern attend in full")
            kinds = [other.replace(kind, "full") for other in kinds]
    if any(kind.startswith("sliding") for kind in kinds):
        window, context = _window(fields), _context(fields)
        if context and window >= context:
            fields.note(
                f"sliding_window {window:,} is no smaller than the context of {context:,} tokens: "
                "no window, full attention"
            )
            kinds = [kind.replace("sliding", "full") for kind in kinds]
    return kinds


def _context(fields: Fields) -> int | None:
    """The longest context: max_position_embeddings, or what a scaling rule stretches it to."""
    longest = fields.count("max_position_embeddings")
    scaling = {**fields.block("rope_scaling"), **fields.block("rope_parameters")}
    factor = scaling.get("factor")
    if longest and isinstance(factor, int | float) and 1 < factor < 1e4:
        first = scaling.get("original_max_position_embeddings") or longest
        longest = max(longest, int(first * factor)) if isinstance(first, int) else longest
    return longest


def _refuse_unplaced(fields: Fields, kinds: list[str]) -> None:
    """Refuse an unknown hybrid: it mixes layers, and nothing readable says which is which."""
    if fields.model_type in model_types()["known"] or fields.raw("layer_types") is not None:
        return
    if any(kind == "recurrent" or kind.endswith("+") for kind in kinds):
        return
    telling = [key for key in model_types()["recurrent_keys"] if fields.data.get(key) is not None]
    if len(set(kinds)) == 1:  # all layers alike, though a list under another name may differ
        telling += [str(k) for k, v in fields.data.items() if _mixes_layers(str(k), v, kinds)]
    if telling:
        why = f"{telling[0]} tells of layers of several kinds"
        expected = "expected a list that says which layers they are; add it"
        fields.fail("layer_types", f"missing, and {why}; {expected}")


def _mixes_layers(key: str, value: object, kinds: list[str]) -> bool:
    """Whether a field looks like a list of what each layer is, or of where a window holds."""
    if not isinstance(value, list) or any(word in key for word in model_types()["mlp_words"]):
        return False
    if kinds[0] == "sliding" and any(word in key for word in model_types()["window_words"]):
        return True
    named = len(value) == len(kinds) and all(isinstance(word, str) for word in value)
    return named and len(set(value)) > 1
