"""vLLM's figures: memory, tokens, blocks and concurrency."""

from __future__ import annotations

from math import floor

from kvlab import costs, kv_costs
from kvlab.audit.checks import check, explain, no_cause
from kvlab.audit.logs import EngineLog
from kvlab.kv_formats import StorageFormat
from kvlab.specs import ModelSpec

DEFAULT_BLOCK_SIZE = 16
#: What paged groups may add to a hybrid model's ideal need, as a share.
HYBRID_SLACK = 0.02


def _is_uniform(spec: ModelSpec) -> bool:
    """Every cached layer grows without a window, and nothing else is kept."""
    return kv_costs.window_cap_bytes(spec) == 0 and kv_costs.fixed_bytes_per_sequence(spec) == 0


def vllm_checks(spec: ModelSpec, log: EngineLog, tp: int, storage: StorageFormat) -> list[dict]:
    block = log.block_size or DEFAULT_BLOCK_SIZE
    rank, width = kv_costs.per_rank(spec, tp), storage.bytes_per_element
    checks = []
    tokens = log.tokens.value if log.tokens else log.blocks.value * block
    if log.tokens and log.blocks:
        checks.append(
            check(
                "tokens from blocks", kv_costs.pool_tokens(int(log.blocks.value), block), tokens,
                log.blocks.value * block == tokens, unit="tokens", independent=False,
                figure=log.blocks, why=f"{block} tokens a block: one is the other, multiplied",
            )
        )  # fmt: skip
    figure = log.tokens or log.blocks
    if log.available_bytes is not None and _is_uniform(rank):
        low, high = (log.available_bytes.value + s * log.available_bytes.rounding for s in (-1, 1))

        def bounds(model: ModelSpec, element) -> tuple[int, int]:
            rate = costs.kv_bytes_per_token(model, element)
            if not rate:
                return 0, 0
            fewest, most = (kv_costs.num_blocks(floor(x), rate, block) for x in (low, high))
            return int(fewest - 1) * block, int(most) * block  # an engine may keep one block back

        def agrees(model: ModelSpec, element) -> bool:
            fewest, most = bounds(model, element)
            return fewest <= tokens <= most

        predicted = kv_costs.pool_tokens(
            kv_costs.num_blocks(
                floor(log.available_bytes.value), costs.kv_bytes_per_token(rank, width), block
            ),
            block,
        )
        right = agrees(rank, width)
        checks.append(
            check(
                "tokens from memory", predicted, tokens, right, unit="tokens", independent=True,
                figure=figure,
                why="memory / bytes per token, in whole blocks, within the rounding of the memory "
                "figure and one reserved block" if right
                else explain(agrees, spec, tp, storage, tokens / (predicted or 1)),
            )
        )  # fmt: skip
    if log.concurrency is not None and log.max_model_len:
        checks.append(_concurrency(rank, width, log, tokens, block))
    return checks


def _concurrency(rank: ModelSpec, width, log: EngineLog, tokens: float, block: int) -> dict:
    """Requests of the longest length: a division of tokens, or a sum over a hybrid's groups."""
    longest, figure = log.max_model_len, log.concurrency
    if _is_uniform(rank):
        most = kv_costs.concurrency(tokens, longest)
        least = kv_costs.concurrency(tokens, -(-longest // block) * block)
        agrees = least - figure.rounding - 1e-9 <= figure.value <= most + figure.rounding + 1e-9
        return check(
            "concurrency from tokens", round(most, 2), figure.value, agrees, unit="requests",
            independent=False, figure=figure,
            why="tokens / tokens per request: it says nothing about bytes"
            if agrees else "the two figures of the log do not belong together",
        )  # fmt: skip
    fixed = kv_costs.fixed_bytes_per_sequence(rank, width)
    if log.available_bytes is None or fixed is None:
        return check(
            "concurrency", None, figure.value, True, unit="requests", independent=False,
            figure=figure,
            why="a hybrid model: tokens, concurrency and bytes are not one division, and the log "
            "has no memory figure (or the config no state size) to predict it from",
        )  # fmt: skip
    ideal, padded = (
        float(log.available_bytes.value / kv_costs.sequence_bytes(model, longest, width))
        for model in (rank, kv_costs.padded_to_full(rank))
    )
    agrees = padded * (1 - HYBRID_SLACK) <= figure.value <= ideal * (1 + HYBRID_SLACK)
    return check(
        "concurrency from memory", round(ideal, 2), figure.value, agrees, unit="requests",
        independent=True, figure=figure,
        why=f"hybrid groups: between {padded:,.2f} (every layer paged for the whole context) and "
        f"{ideal:,.2f} (each window at its own length)"
        if agrees else no_cause(figure.value / (ideal or 1)),
    )  # fmt: skip
