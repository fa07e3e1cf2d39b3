"""Which configs are refused, and why: what they describe keeps no K and V rows of a decoder."""

from __future__ import annotations

from collections.abc import Mapping

from kvlab.configs.fields import ConfigError, Fields, show, words
from kvlab.configs.files import model_types

#: Types whose cache is not K and V rows of a decoder, and why.
NOT_MODELLED = {
    **dict.fromkeys(
        words(
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
            "wav2vec2-conformer wavlm yolos yoso"
        ),
        "an encoder keeps no KV cache",
    ),
    **dict.fromkeys(
        words(
            "bart blenderbot blenderbot-small bigbird_pegasus encoder-decoder fsmt florence2 "
            "led longt5 m2m_100 marian mbart mt5 mvp nllb-moe pegasus pegasus_x plbart "
            "prophetnet speech_to_text switch_transformers t5 t5gemma t5gemma2 udop umt5 "
            "whisper musicgen musicgen_melody canary_decoder cohere_asr dia dia_decoder moonshine "
            "moonshine_streaming pop2piano speech-encoder-decoder vision-encoder-decoder"
        ),
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
TOWERS = words(
    "_vision _vision_model _encoder _audio _audio_model _qformer clip_text_model siglip_text_model "
    "siglip2_text_model"
)
#: Keys that only a model with recurrent layers has.
RECURRENT_KEYS = words(
    "mamba_d_state mamba_n_heads mamba_num_heads n_mamba_heads ssm_state_size mb_per_layer "
    "linear_key_head_dim linear_attn_config ssm_cfg hyena_layer_idxs"
)
#: What the name of a list that places windows has in it.
WINDOW_WORDS = words("window sliding swa global local")
#: What the name of a list about the other half of a layer has in it.
MLP_WORDS = words("mlp ffn moe expert")


def _no_cache(model_type: str) -> str | None:
    """Why a model type is not read, or None."""
    if model_type in NOT_MODELLED or model_type in model_types()["known"]:
        return NOT_MODELLED.get(model_type)
    tower = model_type.endswith(TOWERS) or (
        "bert" in model_type and not model_type.endswith("decoder")
    )
    return "an encoder keeps no KV cache" if tower else None


def refuse(fields: Fields, top: Mapping) -> None:
    """Raise the error that says why this config has no cache of the kind that is sized here."""
    model_type, outer = fields.model_type, top.get("model_type")
    reason = _no_cache(model_type)
    if fields.where and isinstance(outer, str) and outer in NOT_MODELLED:
        raise ConfigError(
            "model_type", f"given {outer!r}: {NOT_MODELLED[outer]}; expected a decoder"
        )
    if reason and not (fields.flag("is_decoder") and "encoder keeps no" in reason):
        raise fields.fail("model_type", f"given {model_type!r}: {reason}; expected a decoder")
    for config in (top, fields.data):
        if config.get("is_encoder_decoder"):
            raise fields.fail(
                "is_encoder_decoder",
                f"given {show(config['is_encoder_decoder'])}: cross-attention is not modelled; "
                f"expected a decoder",
            )
    bidirectional = fields.data.get("use_bidirectional_attention")
    if bidirectional == "all" or (bidirectional is True and model_type == "gemma3_text"):
        raise fields.fail(
            "use_bidirectional_attention",
            f"given {show(bidirectional)}: a bidirectional model keeps no KV cache; "
            f"expected a decoder",
        )


def refuse_unplaced(fields: Fields, kinds: list[str]) -> None:
    """Refuse an unknown hybrid: it mixes layers, and nothing readable says which is which."""
    if fields.model_type in model_types()["known"] or fields.raw("layer_types") is not None:
        return
    if any(kind == "recurrent" or kind.endswith("+") for kind in kinds):
        return
    key = next((key for key in RECURRENT_KEYS if fields.data.get(key) is not None), None)
    if len(set(kinds)) == 1:  # all layers alike, though a list under another name may differ
        lists = [k for k, value in fields.data.items() if _mixes_layers(str(k), value, kinds)]
        key = key or next(iter(lists), None)
    if key:
        raise fields.fail(
            "layer_types",
            f"missing, and {key} tells of layers of several kinds; expected a list that says which "
            f"layers they are; add it",
        )


def _mixes_layers(key: str, value: object, kinds: list[str]) -> bool:
    """Whether a field looks like a list of what each layer is, or of where a window holds."""
    if not isinstance(value, list) or any(word in key for word in MLP_WORDS):
        return False
    if kinds[0] == "sliding" and any(word in key for word in WINDOW_WORDS):
        return True
    named = len(value) == len(kinds) and all(isinstance(word, str) for word in value)
    return named and len(set(value)) > 1
