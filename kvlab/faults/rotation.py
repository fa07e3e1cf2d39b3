"""Faults of the table and of the rotation itself: the right number, turned wrongly."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

import kvlab.model as model_module
from kvlab.faults import checks
from kvlab.faults.describe import NATS, NOTHING, detector, mean_kl
from kvlab.faults.drift import cached_logits, checkpoint, drift, tiny_model, with_rope
from kvlab.faults.registry import Fault, register
from kvlab.faults.seams import replaced
from kvlab.model import Decoder
from kvlab.rope import RopeTable, rope_inv_freq, rope_tables
from kvlab.specs import RopeSpec


def _declared(rope_type: str, dim: int = 64, **params) -> RopeSpec:
    """The checkpoint's own base under a rule that it does not have, for measuring."""
    return RopeSpec(100_000.0, dim, rope_type, tuple(sorted(params.items())))


LLAMA3 = _declared(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=256,
)  # fmt: skip
YARN = _declared("yarn", factor=8.0, original_max_position_embeddings=1024)
LONGROPE = _declared(
    "longrope", short_factor=(1.0,) * 32, long_factor=(4.0,) * 32,
    original_max_position_embeddings=64, max_position_embeddings=64,
)  # fmt: skip
PARTIAL = _declared("default", dim=32)


def _rows(answer) -> AbstractContextManager[None]:
    """Let answer(table, positions) stand for RopeTable.rows."""
    return replaced(RopeTable, "rows", lambda original, table, positions: answer(table, positions))


def _unscaled(table: RopeTable, positions: torch.Tensor):
    return rope_tables(replace(table.rope, rope_type="default", params=()), positions)


def _without_factor(table: RopeTable, positions: torch.Tensor):
    _, factor = rope_inv_freq(table.rope, table.planned_len)
    cos, sin = rope_tables(table.rope, positions, seq_len=table.planned_len)
    return cos / factor, sin / factor


def _in_bf16(table: RopeTable, positions: torch.Tensor):
    inv_freq, factor = rope_inv_freq(table.rope, table.planned_len)
    angles = positions.to(torch.bfloat16)[..., None] * inv_freq.to(torch.bfloat16)
    return angles.float().cos() * factor, angles.float().sin() * factor


def _switching(table: RopeTable, positions: torch.Tensor):
    return rope_tables(table.rope, positions, seq_len=int(positions.max()) + 1)


def _interleaved() -> AbstractContextManager[None]:
    def apply_rope(original, x, cos, sin, interleaved=False):
        return original(x, cos, sin, interleaved=not interleaved)

    return replaced(model_module, "apply_rope", apply_rope)


def _all_dims() -> AbstractContextManager[None]:
    def forward(original, model, token_ids, positions, attend, rows=None):
        whole = copy.copy(model)  # its spec still says how much ought to turn
        whole.rope = RopeTable(replace(model.spec.rope, rotary_dim=model.spec.head_dim))
        return original(whole, token_ids, positions, attend, rows)

    return replaced(Decoder, "forward", forward)


def _tiny(rope: RopeSpec, steps: int, prompt: int = 6) -> None:
    """A tiny cached run under other rotary settings (head_dim 16)."""
    ids = [(7 * i) % 50 for i in range(prompt + steps)]
    cached_logits(with_rope(tiny_model(), rope, max_seq_len=8192), ids, prompt)


def _run_llama3(steps: int = 8) -> None:
    _tiny(replace(LLAMA3, rotary_dim=16), steps, prompt=200)


def _run_long(steps: int = 8) -> None:
    _tiny(tiny_model().spec.rope, steps, prompt=100)


def _run_yarn(steps: int = 8) -> None:
    _tiny(replace(YARN, rotary_dim=16), steps)


def _run_partial(steps: int = 8) -> None:
    _tiny(replace(PARTIAL, rotary_dim=8), steps)


def _run_longrope(steps: int = 8) -> None:
    """Crosses the original length of 8 with keys in the cache, on a table planned for it."""
    rope = _declared(
        "longrope", dim=16, short_factor=(1.0,) * 8, long_factor=(4.0,) * 8,
        original_max_position_embeddings=8, max_position_embeddings=8,
    )  # fmt: skip
    _tiny(rope, steps)


def _declared_kl(rope: RopeSpec, **options):
    """Mean KL of the checkpoint run as if its config declared `rope`."""

    def measure() -> float:
        return drift(with_rope(checkpoint().model, rope), **options).mean_kl

    return measure


AS_IF = ", the rule declared for the measurement"

register(
    Fault(
        name="interleaved_for_half_split",
        layer="position",
        symptom="Fluent nonsense from the first token, with and without a cache.",
        smallest_input="x = [1..8], position 1: half-split gives [-3.667, 1.391, ...], "
        "interleaved [-1.143, 1.922, ...].",
        looks_like="Shapes are right and so are all norms, which is what one would test first.",
        detector="The first layer's q and k, as attention gets them, equal R(position) W x, with "
        "R from the checkpoint's own pairing; the exact vector in the tests.",
        cure="Most Hugging Face checkpoints are half-split, but not all: read the model's own "
        "code. Convert by permuting the rows of W_q and W_k alike, or rotate the other way; never "
        "half of each.",
        source="huggingface/transformers#25199, rasbt/LLMs-from-scratch#747, "
        "jzhang38/TinyLlama#24, huggingface/nanotron#427",
        switch=_interleaved,
        detect=detector(checks.watch_rotation),
        watch=checks.watch_rotation,
        measure=mean_kl(),
        unit=NATS,
        threshold=0.1,
    ),
    Fault(
        name="scaling_parsed_not_applied",
        layer="position",
        symptom="Short prompts are right, long ones lose the thread past the original context.",
        smallest_input="Llama-3.1-8B, last inv_freq: must be 3.068926e-7, the fault keeps "
        "2.455141e-6.",
        looks_like="The config prints with its scaling rule; only the table knows nothing of it.",
        detector="The table in use equals one computed from the spec in float64, at the "
        "positions of this step.",
        cure="Build the table from the scaled frequencies and test its last entry; read both "
        "`type` and `rope_type`.",
        source="huggingface/transformers#32330, lablup/mlxcel#1355, jmaczan/tiny-vllm#1, "
        "unslothai/unsloth#6197",
        switch=lambda: _rows(_unscaled),
        detect=detector(checks.watch_tables, _run_llama3),
        watch=checks.watch_tables,
        measure=_declared_kl(LLAMA3, prompt_len=300, num_steps=16),
        unit=NATS + AS_IF,
        threshold=1e-3,
    ),
    Fault(
        name="yarn_factor_dropped",
        layer="position",
        symptom="Attention too flat, at every length; answers a little vague.",
        smallest_input="YaRN with factor 8: cos and sin must be multiplied by 1.2079441541679836.",
        looks_like="Angles are all right, and so is every test that looks at angles.",
        detector="The table in use equals one computed from the spec in float64; "
        "cos^2 + sin^2 is the factor squared.",
        cure="Multiply cos and sin by 0.1 ln(factor) + 1 (or the config's attention_factor).",
        source="rasbt/LLMs-from-scratch#940",
        switch=lambda: _rows(_without_factor),
        detect=detector(checks.watch_tables, _run_yarn),
        watch=checks.watch_tables,
        measure=_declared_kl(YARN),
        unit=NATS + AS_IF,
        threshold=1e-3,
    ),
    Fault(
        name="bf16_angles",
        layer="position",
        symptom="Quality falls as the context grows; below a few dozen tokens nothing is wrong.",
        smallest_input="Position 257 in bfloat16 is 256: two neighbours share one angle.",
        looks_like="The speeds were float32 when they were made; casting the model cast them, and "
        "angles are computed from them since.",
        detector="The table in use equals one computed from the spec in float64.",
        cure="Compute position * inv_freq in float32, always; round cos and sin, if at all.",
        source="EleutherAI/gpt-neox#1003, huggingface/transformers#29285, "
        "huggingface/transformers#25681, huggingface/candle#3520",
        switch=lambda: _rows(_in_bf16),
        detect=detector(checks.watch_tables, _run_long),
        watch=checks.watch_tables,
        measure=mean_kl(prompt_len=300, num_steps=16),
        unit=NATS + ", after 300 tokens",
        threshold=1e-3,
    ),
    Fault(
        name="table_switch_leaves_keys_stale",
        layer="position",
        symptom="Gibberish from one token on, exactly where the original context ends.",
        smallest_input="Original length 8, prompt 7, generate 3: from length 9 the new queries "
        "turn with the long table, the cached keys stay with the short one.",
        looks_like=NOTHING + "Without a cache the same run is right.",
        detector="The table in use is the one that the first key was rotated with (it equals the "
        "planned one in float64).",
        cure="Choose the table once from the planned length, or recompute the prompt, or cache "
        "unrotated keys and rotate on read.",
        source="huggingface/transformers#33129, microsoft/onnxruntime-genai#1161, "
        "ggml-org/llama.cpp#24875, lablup/mlxcel#1358",
        switch=lambda: _rows(_switching),
        detect=detector(checks.watch_tables, _run_longrope),
        watch=checks.watch_tables,
        measure=_declared_kl(LONGROPE, prompt_len=64, num_steps=16),
        unit=NATS + AS_IF,
        threshold=1e-2,
    ),
    Fault(
        name="partial_rotary_ignored",
        layer="position",
        symptom="Wrong from the first token on models that rotate a part of each head.",
        smallest_input="phi-2: head_dim 80, factor 0.4: dims 32..79 must come out bit for bit "
        "as they went in.",
        looks_like="Shapes and norms are right. Models with full rotation are right.",
        detector="The first layer's q and k, as attention gets them, equal R(position) W x; "
        "dims past rotary_dim are unchanged.",
        cure="rotary_dim = head_dim * partial_rotary_factor, cut to an even number; look for the "
        "factor inside rope_parameters too.",
        source="five factors in four places: phi-2 0.4, Phi-4-mini 0.75 and pythia 0.25 in "
        "Lightning-AI/litgpt's model table, Qwen3.5 0.25 and MiMo-V2-Flash 0.334 in "
        "ai-dynamo/aiconfigurator's configs",
        switch=_all_dims,
        detect=detector(checks.watch_rotation, _run_partial),
        watch=checks.watch_rotation,
        measure=_declared_kl(PARTIAL),
        unit=NATS + AS_IF,
        threshold=1e-3,
    ),
)
