"""What words for layers mean, and what model types imply by saying nothing.

Facts about model families, apart from the code that reads files (layer_patterns.py).
"""

from __future__ import annotations

from collections.abc import Callable

from kvlab.configs.fields import words

#: Every name that a list of layer types has been seen to use.
WORDS = {
    "full": (
        "full_attention full attention attn global global_attention full_attn softmax "
        "indexed_attention deepseek_sparse_attention qwen_sparse_attention minimax_m3_sparse"
    ),
    "sliding": "sliding_attention sliding local local_attention sliding_window swa",
    "chunked": "chunked_attention chunked",
    "recurrent": (
        "linear_attention linear mamba mamba2 recurrent conv short_conv kda gdn lightning "
        "gated_deltanet gated_delta_net"
    ),
    "none": "moe mlp ffn",
    "full+": "hybrid",
    "sliding+": "hybrid_sliding",
}
KIND_OF = {word: kind for kind, words in WORDS.items() for word in words.split()}
INDEXED = WORDS["full"].split()[-4:]
#: One letter a layer, as Nemotron-H and its kin write it.
LETTERS = {"M": "recurrent", "E": "none", "-": "none", "*": "full"}

#: Qwen's gate: no window unless use_sliding_window says so, and then from max_window_layers on.
GATED = frozenset(
    words(
        "qwen2 qwen2_moe qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text "
        "qwen2_5_omni_text qwen3 qwen3_moe smollm3 deepseek_ocr2_encoder iquestcoder"
    )
)
#: Types whose code never reads sliding_window when no list of layer types stands beside it.
NO_WINDOW = frozenset(words("cohere_compass_text laguna mellum step3p5 zaya minimax nemotron_h"))
#: attn_layer_offset where the file gives only the period.
ATTENDS_AT = {"jamba": 4, "zamba": 4}
NEEDS_A_LIST = frozenset(("nemotron_h",))
ALL_RECURRENT = frozenset(
    words(
        "mamba mamba2 falcon_mamba rwkv rwkv5 rwkv6 rwkv7 xlstm granitemoehybrid retnet gla "
        "delta_net gated_deltanet hgrn hgrn2"
    )
)


def every_nth_full(n: int, other: str = "sliding", first: int | None = None) -> Callable:
    """Layers first, first + n, ... attend in full (first defaults to n - 1); others do not."""
    start = n - 1 if first is None else first
    return lambda i, num_layers: "full" if i >= start and (i - start) % n == 0 else other


def _flint(i: int, num_layers: int) -> str:
    return "full" if i < 2 or i % 4 == 1 or i == num_layers - 1 else "sliding"


def _last_too(rule: Callable) -> Callable:
    return lambda i, num_layers: "full" if i == num_layers - 1 else rule(i, num_layers)


def _from_the_end(i: int, num_layers: int) -> str:
    return "full" if (num_layers - 1 - i) % 4 == 0 else "sliding"


def _zamba(i: int, num_layers: int) -> str:
    attends = i == 2 or (i > 2 and (i - 3) % 6 == 4)
    return "full+" if attends else "recurrent"


#: Zamba-2's shared attention blocks sit before these of its 54 Mamba layers.
ZAMBA2_ATTENDS = frozenset((*range(6, 43, 6), 47, 51))


def _lara(i: int, num_layers: int) -> str:
    return ("recurrent", "sliding", "recurrent", "full", "sliding")[i % 5]


def _lfm3(i: int, num_layers: int) -> str:
    return "full" if i % 4 == 2 else "sliding" if i % 4 == 0 and i > 0 else "recurrent"


def _olmo_hybrid(i: int, num_layers: int) -> str:
    return "full" if i % 4 == 3 or (num_layers < 4 and i == num_layers - 1) else "recurrent"


def _dots3(i: int, num_layers: int) -> str:
    return "full" if i < 2 or i % 4 == 1 else "sliding"


#: What a model type means when no key says which layer attends how. Held to transformers' own
#: config classes by tests/test_config_classes.py.
IMPLIED: dict[str, Callable[[int, int], str]] = {
    "gemma2": every_nth_full(2),
    "vaultgemma": every_nth_full(2),
    "gpt_oss": every_nth_full(2),
    "gpt_neo": every_nth_full(2, first=0),
    "gemma3_text": every_nth_full(6),
    "gemma3n_text": every_nth_full(5),
    "gemma4_text": _last_too(every_nth_full(6)),
    "gemma4_unified_text": _last_too(every_nth_full(6)),
    "diffusion_gemma_text": _last_too(every_nth_full(6)),
    "t5gemma2_decoder": every_nth_full(6),
    "cohere2": every_nth_full(4),
    "cohere2_moe": every_nth_full(4),
    "exaone4": every_nth_full(4),
    "exaone_moe": every_nth_full(4),
    "olmo3": every_nth_full(4),
    "afmoe": every_nth_full(4),
    "cwm": every_nth_full(4, first=0),
    "granite_swa": every_nth_full(4, first=0),
    "granitemoe_swa": every_nth_full(4, first=0),
    "modernbert-decoder": every_nth_full(3, first=0),
    "beam": _last_too(every_nth_full(6)),
    "kolibri1": every_nth_full(5),
    "flint": _flint,
    "muse_glimmer_text": _from_the_end,
    "muse_spark_text": _from_the_end,
    "dots3_note_text": _dots3,
    "mimo_v2_flash": lambda i, n: "full" if i == 0 or (i + 1) % 6 == 0 else "sliding",
    "inkling_text": lambda i, n: "full+" if (i + 1) % 6 == 0 else "sliding+",
    "inkling2_text": lambda i, n: "full+" if (i + 1) % 6 == 0 else "sliding+",
    "llama4_text": every_nth_full(4, "chunked"),
    "qwen3_next": every_nth_full(4, "recurrent"),
    "qwen3_5_text": every_nth_full(4, "recurrent"),
    "qwen3_5_moe_text": every_nth_full(4, "recurrent"),
    "qwen4_exp_text": every_nth_full(4, "recurrent"),
    "glm5_next_text": every_nth_full(4, "recurrent"),
    "kimi_linear": every_nth_full(4, "recurrent", first=4),
    "bailing_hybrid": every_nth_full(6, "recurrent"),
    "minimax": every_nth_full(2, "recurrent", first=0),
    "jamba": every_nth_full(8, "recurrent", first=4),
    "olmo_hybrid": _olmo_hybrid,
    "lara_mini": _lara,
    "lfm3": _lfm3,
    "recurrent_gemma": lambda i, n: "sliding" if i % 3 == 2 else "recurrent",
    "bamba": lambda i, n: "recurrent",
    "zamba": _zamba,
    "zamba2": lambda i, n: "full+" if i in ZAMBA2_ATTENDS else "recurrent",
    "falcon_h1": lambda i, n: "full+",
    "zaya": lambda i, n: "full+",
}
