"""What a model type means by saying nothing: names, layer patterns, recurrent state, rotation.

Facts about model families and no code that reads a file. Numbers that a type means by an absent
key stand in data/model_types.json; tests/test_config_classes.py holds both to transformers.
"""

from __future__ import annotations

from typing import Any


def names(text: str) -> tuple[str, ...]:
    """The names in a line of text: long lists of model types stay readable that way."""
    return tuple(text.split())


def each(text: str, meaning: Any) -> dict[str, Any]:
    """Each name in a line of text -> the same meaning."""
    return dict.fromkeys(text.split(), meaning)


#: canonical name -> the names that older or other model types give the same field
ALIASES = {
    "num_hidden_layers": "n_layer n_layers num_layers num_transformer_layers",
    "hidden_size": "n_embd n_embed d_model model_dim dim hidden_dim",
    "num_attention_heads": "n_head n_heads num_heads num_query_heads",
    "num_key_value_heads": (
        "num_kv_heads n_head_kv n_kv_heads kv_n_heads n_kv_head multi_query_group_num "
        "num_multi_query_heads num_query_groups num_attention_groups"
    ),
    "head_dim": "attention_head_dim kv_channels head_size d_head",
    "intermediate_size": "n_inner ffn_hidden_size d_ff ffn_dim block_ff_dim",
    "vocab_size": "padded_vocab_size",
    "max_position_embeddings": (
        "n_positions n_ctx max_seq_len seq_length max_sequence_length model_max_length"
    ),
    "sliding_window": "sliding_window_size attention_window_size window_size",
    "layer_types": "layers_block_type",
    "rms_norm_eps": "layer_norm_eps layer_norm_epsilon norm_eps norm_epsilon",
}
#: Old names of single model types, too general to try elsewhere.
KOSMOS = {
    "num_hidden_layers": "layers",
    "num_attention_heads": "attention_heads",
    "hidden_size": "embed_dim",
}
EXTRA_ALIASES = {
    "kosmos_2_text_model": KOSMOS,
    "kosmos_2_5_text_model": KOSMOS,
    "gpt_neo": {"layer_types": "attention_layers"},
    "xglm": {"num_attention_heads": "attention_heads"},
    "trocr": {
        "num_hidden_layers": "decoder_layers",
        "num_attention_heads": "decoder_attention_heads",
    },
}
#: Names that mean something else in one model type, so they are no alias there.
NOT_ALIASES = {
    "longcat_flash": {"num_layers"},
    "mamba2": {"num_heads", "head_dim"},
    "zamba2": {"kv_channels"},
    "mimo_v2_flash": {"sliding_window_size"},
    "openelm": {"ffn_dim", "model_max_length"},
    "exaone": {"hidden_dim"},
    "git": {"sliding_window_size"},  # Grok-2 goes by this name, and its -1 means no window
}

# --- refused: what keeps no K and V rows of a decoder ------------------------------------------

ENCODER = "an encoder keeps no KV cache"
#: model type -> why it is not read
REFUSED = {
    **each(
        "albert bert bert-generation big_bird camembert deberta deberta-v2 data2vec-text "
        "distilbert electra ernie megatron-bert modernbert mpnet nomic_bert rembert "
        "roberta roc_bert roformer roberta-prelayernorm xlm xlm-roberta xlm-roberta-xl "
        "xmod clip siglip vit aimv2 align altclip audio-spectrogram-transformer beit bros "
        "canine chinese_clip clap clipseg data2vec-audio data2vec-vision deit dinat dinov2 "
        "dinov2_with_registers dinov3_vit donut-swin dpr dpt embedding_gemma2 esm esmc "
        "eurobert flava funnel gte hubert ijepa jina_embeddings_v3 layoutlm layoutlmv2 "
        "layoutlmv3 layoutxlm lilt longformer luke markuplm mlcd mra neomme nystromformer "
        "owlv2 owlvit pixtral sew sew-d siglip2 splinter swin swinv2 tapas timesformer "
        "unispeech unispeech-sat videomae vilt vit_mae vit_msn vitdet vivit vjepa2 wav2vec2 "
        "wav2vec2-conformer wavlm yolos yoso",
        ENCODER,
    ),
    **each(
        "bart blenderbot blenderbot-small bigbird_pegasus encoder-decoder fsmt florence2 "
        "led longt5 m2m_100 marian mbart mt5 mvp nllb-moe pegasus pegasus_x plbart "
        "prophetnet speech_to_text switch_transformers t5 t5gemma t5gemma2 udop umt5 "
        "whisper musicgen musicgen_melody canary_decoder cohere_asr dia dia_decoder moonshine "
        "moonshine_streaming pop2piano speech-encoder-decoder vision-encoder-decoder",
        "an encoder-decoder also keeps cross-attention K and V, sized by its other input",
    ),
    "deepseek_v4": "its layers keep compressed K and V on top of a window",
    "dory": "its recurrent layers keep K and V once a loop",
    "hrm_text": "its stacks run several times and keep K and V each time",
    "inkling2_loop_text": "its core layers run several times and keep K and V each time",
    "unlimited_ocr_text": "its layers keep the prompt in full and a window of what follows",
    "reformer": "its layers keep hashed buckets instead of K and V",
    "xlnet": "its layers keep memories instead of K and V",
}
#: The ends of names that towers go by: the parts of a multimodal model that see or hear.
TOWERS = names(
    "_vision _vision_model _encoder _audio _audio_model _qformer clip_text_model siglip_text_model "
    "siglip2_text_model"
)
#: Keys that only a model with recurrent layers has.
RECURRENT_KEYS = names(
    "mamba_d_state mamba_n_heads mamba_num_heads n_mamba_heads ssm_state_size mb_per_layer "
    "linear_key_head_dim linear_attn_config ssm_cfg hyena_layer_idxs"
)

# --- which layer attends how -------------------------------------------------------------------

#: Every name that a list of layer types has been seen to use; "+" also carries a recurrent state.
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
INDEXED = WORDS["full"].split()[-4:]  # with an indexer that chooses among the keys

LETTERS = {"F": "full", "S": "sliding", "C": "chunked", "R": "recurrent", "f": "full+",
           "s": "sliding+"}  # fmt: skip
#: The first layers where they are apart, then | and what repeats, in the letters above.
PATTERNS = {
    "SF": "gemma2 vaultgemma gpt_oss",
    "FS": "gpt_neo",
    "SSSSSF": "gemma3_text gemma4_text gemma4_unified_text diffusion_gemma_text t5gemma2_decoder "
    "beam",
    "SSSSF": "gemma3n_text kolibri1",
    "SSSF": "cohere2 cohere2_moe exaone4 exaone_moe olmo3 afmoe muse_glimmer_text muse_spark_text",
    "FSSS": "cwm granite_swa granitemoe_swa",
    "FSS": "modernbert-decoder",
    "FF|SSSF": "flint dots3_note_text",
    "F|SSSSFS": "mimo_v2_flash",
    "sssssf": "inkling_text inkling2_text",
    "CCCF": "llama4_text",
    "RRRF": "qwen3_next qwen3_5_text qwen3_5_moe_text qwen4_exp_text glm5_next_text olmo_hybrid",
    "RRRR|FRRR": "kimi_linear",
    "RRRRRF": "bailing_hybrid",
    "FR": "minimax",
    "RRRRFRRR": "jamba",
    "RSRFS": "lara_mini",
    "R|RFRS": "lfm3",
    "RRS": "recurrent_gemma",
    "R": "bamba",
    "RRf|RRRRfR": "zamba",
    "RRRRRR" + 6 * "fRRRRR" + "fRRRRfRRRf|R": "zamba2",  # where its shared blocks sit
    "f": "falcon_h1 zaya",
}
#: model type -> the pattern that it means when no key says which layer attends how
IMPLIED = {name: pattern for pattern, names in PATTERNS.items() for name in names.split()}
#: Types that count their pattern back from the last layer.
FROM_THE_END = {"muse_glimmer_text", "muse_spark_text"}
#: Types whose last layer attends in full, whatever the pattern has come to.
LAST_IN_FULL = {"gemma4_text", "gemma4_unified_text", "diffusion_gemma_text", "beam", "flint"}
ALL_RECURRENT = names(
    "mamba mamba2 falcon_mamba rwkv rwkv5 rwkv6 rwkv7 xlstm granitemoehybrid retnet gla "
    "delta_net gated_deltanet hgrn hgrn2"
)
#: Types with Qwen's gate: no window unless use_sliding_window says so, and then from
#: max_window_layers on, or from the layer given here.
GATED = {
    **each(
        "qwen2 qwen2_moe qwen2_vl qwen2_5_vl qwen2_5_omni_text qwen3 smollm3 "
        "deepseek_ocr2_encoder iquestcoder",
        28,
    ),
    "qwen2_vl_text": 80,
    "qwen2_5_vl_text": 80,
    "qwen3_moe": 0,
}
#: Types whose code never reads sliding_window when no list of layer types stands beside it.
NO_WINDOW = names("cohere_compass_text laguna mellum step3p5 zaya minimax nemotron_h")

# --- widths ----------------------------------------------------------------------------------

#: Types in which head_dim always follows from the width and the heads.
DERIVED_HEAD_DIM = {"cohere2", "zamba2", "recurrent_gemma", "falcon"}
#: Types with global_head_dim: wider heads where a layer attends in full.
WIDER_IN_FULL = {"gemma4_text", "gemma4_unified_text", "diffusion_gemma_text"}
#: Types whose MLP is four times as wide as the model where no key says so.
MLP_OF_FOUR = {"gpt2", "gptj", "gpt_bigcode", "bloom", "falcon"}

# --- rotation ----------------------------------------------------------------------------------

#: Types that rotate nothing: learned or absolute positions, ALiBi, or no positions at all.
UNROTATED = names(
    "gpt2 gpt-sw3 openai-gpt opt bloom mpt gpt_bigcode gpt_neo xglm biogpt ctrl cpmant jamba "
    "zamba mamba mamba2 falcon_mamba rwkv xlstm nemotron_h trocr blip_text_model"
)
#: Share of each head that is rotated where the file does not say (transformers 5.24).
PARTIAL = {
    **each("phi nemotron persimmon chatglm glm glm4 glm4_moe bamba recurrent_gemma", 0.5),
    **each("qwen3_next qwen3_5_text qwen3_5_moe_text qwen4_exp_text gpt_neox stablelm", 0.25),
}
