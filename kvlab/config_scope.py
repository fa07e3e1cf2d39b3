"""Which configs are refused, and why: what they describe keeps no K and V rows of a decoder."""

from __future__ import annotations

from collections.abc import Mapping

from kvlab.config_fields import Fields, show, words

#: Types whose cache is not K and V rows of a decoder, and why.
NOT_MODELLED = {
    **dict.fromkeys(
        words(
            "albert bert bert-generation big_bird camembert deberta deberta-v2 data2vec-text "
            "distilbert electra ernie megatron-bert modernbert mpnet nomic_bert rembert "
            "roberta roc_bert roformer roberta-prelayernorm xlm xlm-roberta xlm-roberta-xl "
            "xmod clip siglip vit"
        ),
        "an encoder keeps no KV cache",
    ),
    **dict.fromkeys(
        words(
            "bart blenderbot blenderbot-small bigbird_pegasus encoder-decoder fsmt florence2 "
            "led longt5 m2m_100 marian mbart mt5 mvp nllb-moe pegasus pegasus_x plbart "
            "prophetnet speech_to_text switch_transformers t5 t5gemma t5gemma2 udop umt5 "
            "whisper musicgen musicgen_melody"
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


def refuse(fields: Fields, top: Mapping) -> None:
    model_type = fields.model_type
    reason = NOT_MODELLED.get(model_type)
    if reason and not (fields.flag("is_decoder") and "encoder keeps no" in reason):
        raise fields.fail("model_type", f"given {model_type!r}: {reason}; expected a decoder")
    for config in (top, fields.data):
        if config.get("is_encoder_decoder") is True:
            raise fields.fail(
                "is_encoder_decoder",
                "given true: cross-attention is not modelled; expected a decoder",
            )
    bidirectional = fields.data.get("use_bidirectional_attention")
    if bidirectional == "all" or (bidirectional is True and model_type == "gemma3_text"):
        raise fields.fail(
            "use_bidirectional_attention",
            f"given {show(bidirectional)}: a bidirectional model keeps no KV cache; "
            f"expected a decoder",
        )
