"""An engine's start-up log against the cost model: does the cache hold what it should?

Three figures of a log look like a proof and are not: tokens, tokens per request and concurrency
are one division. An independent check sets bytes (or memory) against tokens, because only there
does the model's shape enter. Each check says which kind it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from math import floor, inf

from kvlab import costs
from kvlab.costs import CACHING_KINDS, FORMATS, CostError, StorageFormat
from kvlab.sheet.kv import SheetError, asked_model, require, storage_format
from kvlab.sheet.logs import EngineLog, Figure, Pool, Store, read_log
from kvlab.specs import LayerSpec, ModelSpec

DEFAULT_BLOCK_SIZE = 16
#: What paged groups may add to a hybrid model's ideal need, as a share.
HYBRID_SLACK = 0.02
#: (model of one rank, bytes of an element) -> does the check agree?
Agrees = Callable[[ModelSpec, int | Fraction], bool]


def audit(
    spec: ModelSpec,
    log_text: str,
    tensor_parallel: int | None = None,
    kv_dtype: str | None = None,
) -> dict:
    """Every figure of the log that can be predicted, predicted.

    tensor_parallel, kv_dtype  override what the log says, where it says it (1 and bf16 otherwise)

    agrees is true if every check does; independent is true if one of them could have failed for a
    wrong model. Raises SheetError, or CostError for ranks that cannot hold the model.
    """
    log = read_log(log_text)
    tp = (log.tensor_parallel or 1) if tensor_parallel is None else tensor_parallel
    whole = isinstance(tp, int) and not isinstance(tp, bool)
    require(whole, f"tensor parallel: given {tp!r}; expected a whole number")
    storage = storage_format(kv_dtype or log.kv_dtype or "bf16")
    notes, stages = list(spec.notes), log.pipeline_parallel or 1
    if stages > 1:
        held = -(-len(spec.layers) // stages)
        notes.append(f"a pipeline stage of {stages} holds at most {held} of the layers")
        spec = replace(spec, layers=spec.layers[:held])
    engines = {"vLLM": _vllm, "SGLang": _sglang, "llama.cpp": _llama_cpp}
    checks = engines[log.engine](spec, log, tp, storage)
    require(
        checks != [],
        f"the {log.engine} log has one figure and nothing to set beside it: add the line with "
        "the memory for the cache, or the one with the concurrency",
    )
    independent = any(check["independent"] for check in checks)
    if not independent:
        notes.append("No figure of this log depends on the model's shape.")
    return {
        "engine": log.engine,
        "model": spec.name,
        "tensor_parallel": tp,
        "kv_dtype": storage.name,
        "kv_bytes_per_token_and_rank": float(
            costs.kv_bytes_per_token(_stored(spec, tp, storage), storage.bytes_per_element)
        ),
        "checks": checks,
        "independent": independent,
        "agrees": all(check["agrees"] for check in checks),
        "notes": notes,
    }


def ask_audit(
    log: str,
    model: str | None = None,
    config: str | None = None,
    tp: int | None = None,
    kv_dtype: str | None = None,
) -> dict:
    """`audit` of a pasted log, for a preset's name or pasted config.json text."""
    return audit(asked_model(model, config), log, tp, kv_dtype)


def _stored(spec: ModelSpec, tp: int, storage: StorageFormat) -> ModelSpec:
    """The model as one rank stores it, the scales of its rows included."""
    return costs.with_scales(costs.per_rank(spec, tp), storage)


def _check(
    name: str, unit: str, predicted: float | None, reported: float, agrees: bool,
    figure: Figure | None, why: str, independent: bool = False,
) -> dict:  # fmt: skip
    """A row of the audit. independent: the check could have failed for a wrong model."""
    return {
        "name": name,
        "predicted": predicted,
        "reported": reported,
        "unit": unit,
        "agrees": bool(agrees),
        "independent": independent,
        "line": figure.line if figure else None,
        "why": why,
    }


# --- why a check does not agree ---------------------------------------------------------------


def _alternatives(spec: ModelSpec, tp: int, storage: StorageFormat) -> Iterator[tuple]:
    """(what would have to be true, spec of a rank, bytes of an element): causes to try."""
    rank, width = _stored(spec, tp, storage), storage.bytes_per_element
    for name in ("fp32", "bf16", "fp8", "int4"):
        other = FORMATS[name].bytes_per_element
        if other != width:
            plain = costs.per_rank(spec, tp)
            yield f"the cache is stored as {name}, not {storage.name}", plain, other
    for ranks in (1, 2, 4, 8, 16):
        if ranks != tp:
            try:
                other_rank = _stored(spec, ranks, storage)
            except CostError:
                continue  # so many ranks cannot hold this model
            yield f"the figures are for {ranks} tensor-parallel ranks, not {tp}", other_rank, width
    if spec.num_heads and spec.hidden_size:
        heads = tuple(replace(x, num_kv_heads=spec.num_heads) for x in spec.layers)
        shared = _stored(replace(spec, layers=heads), tp, storage)
        yield "the cache is sized from query heads", shared, width
        derived = spec.hidden_size // spec.num_heads
        narrow = tuple(replace(x, key_dim=derived, value_dim=derived) for x in rank.layers)
        yield "the head size is derived as hidden / heads", replace(rank, layers=narrow), width
    yield "the latent is stored expanded", costs.expanded(rank), width
    yield "the draft (MTP) layers have a cache too", costs.with_mtp(rank), width


def _explain(agrees: Agrees, spec: ModelSpec, tp: int, storage: StorageFormat, ratio: float) -> str:
    """Which other assumption would make the check agree, for a check that does not."""
    causes = [text for text, rank, width in _alternatives(spec, tp, storage) if agrees(rank, width)]
    return f"it would agree if {'; or if '.join(causes)}" if causes else _no_cause(ratio)


def _no_cause(ratio: float) -> str:
    """What to say where nothing usual explains a figure that is `ratio` times the predicted one."""
    if ratio == inf:
        return (
            "no usual cause fits: nothing of this kind is predicted. Is it the right config, and "
            "does the engine keep a second copy?"
        )
    return (
        f"no usual cause fits: the log's figure is {float(ratio):.3f} times the predicted one. Is "
        "it the right config, and does the pool hold something else beside K and V?"
    )


# --- vLLM: memory, tokens, blocks and concurrency ---------------------------------------------


def _vllm(spec: ModelSpec, log: EngineLog, tp: int, storage: StorageFormat) -> list[dict]:
    block = log.block_size or DEFAULT_BLOCK_SIZE
    rank, width = _stored(spec, tp, storage), storage.bytes_per_element
    figure = log.tokens or log.blocks
    assert figure is not None, "read_log refuses a log of vLLM without tokens and blocks"
    tokens = log.tokens.value if log.tokens else figure.value * block
    checks = []
    if log.tokens and log.blocks:
        held = costs.pool_tokens(int(log.blocks.value), block)
        agrees = log.blocks.value * block == tokens
        why = f"{block} tokens a block: one is the other, multiplied"
        checks.append(_check("tokens from blocks", "tokens", held, tokens, agrees, log.blocks, why))
    # Every cached layer grows without a window, and nothing else is kept.
    uniform = costs.window_cap_bytes(rank) == 0 and costs.fixed_bytes_per_sequence(rank) == 0
    if log.available_bytes and uniform:
        checks.append(
            _tokens_from_memory(spec, tp, storage, log.available_bytes, tokens, block, figure)
        )
    if log.concurrency and log.max_model_len:
        if uniform:
            checks.append(_concurrency(log.concurrency, log.max_model_len, tokens, block))
        else:
            checks.append(
                _hybrid_concurrency(
                    rank, width, log.concurrency, log.max_model_len, log.available_bytes
                )
            )
    return checks


def _tokens_from_memory(
    spec: ModelSpec, tp: int, storage: StorageFormat, memory: Figure, tokens: float, block: int,
    figure: Figure,
) -> dict:  # fmt: skip
    def pool(num_bytes: float, model: ModelSpec, width: int | Fraction) -> int:
        rate = costs.kv_bytes_per_token(model, width)
        return int(costs.num_blocks(floor(num_bytes), rate, block)) * block if rate else 0

    def agrees(model: ModelSpec, width: int | Fraction) -> bool:
        least = pool(memory.value - memory.rounding, model, width) - block  # one block kept back
        return least <= tokens <= pool(memory.value + memory.rounding, model, width)

    rank, width = _stored(spec, tp, storage), storage.bytes_per_element
    require(
        costs.kv_bytes_per_token(rank, width) != 0,
        "blocks: given a model that keeps nothing per token; expected layers with K and V, "
        "without which a pool has no number of blocks; is it the right config?",
    )
    predicted, right = pool(memory.value, rank, width), agrees(rank, width)
    why = (
        "memory / bytes per token, in whole blocks, within the rounding of the memory figure and "
        "one reserved block"
        if right
        else _explain(agrees, spec, tp, storage, tokens / (predicted or 1))
    )
    return _check("tokens from memory", "tokens", predicted, tokens, right, figure, why, True)


def _concurrency(figure: Figure, longest: int, tokens: float, block: int) -> dict:
    """Requests of the longest length: a division of tokens."""
    most = costs.concurrency(tokens, longest)
    least = costs.concurrency(tokens, -(-longest // block) * block)
    right = least - figure.rounding - 1e-9 <= figure.value <= most + figure.rounding + 1e-9
    why = (
        "tokens / tokens per request: it says nothing about bytes"
        if right
        else "the two figures of the log do not belong together"
    )
    name = "concurrency from tokens"
    return _check(name, "requests", round(most, 2), figure.value, right, figure, why)


def _hybrid_concurrency(
    rank: ModelSpec, width: int | Fraction, figure: Figure, longest: int, memory: Figure | None
) -> dict:
    """Requests of the longest length: a sum over a hybrid model's groups of layers."""
    if memory is None or costs.fixed_bytes_per_sequence(rank, width) is None:
        why = (
            "a hybrid model: tokens, concurrency and bytes are not one division, and the log has "
            "no memory figure (or the config no state size) to predict it from"
        )
        return _check("concurrency", "requests", None, figure.value, True, figure, why)
    ideal, padded = (
        float(memory.value / costs.sequence_bytes(model, longest, width))
        for model in (rank, costs.padded_to_full(rank))
    )
    right = padded * (1 - HYBRID_SLACK) <= figure.value <= ideal * (1 + HYBRID_SLACK)
    why = (
        f"hybrid groups: between {padded:,.2f} (every layer paged for the whole context) and "
        f"{ideal:,.2f} (each window at its own length)"
        if right
        else _no_cause(figure.value / (ideal or 1))
    )
    name, predicted = "concurrency from memory", round(ideal, 2)
    return _check(name, "requests", predicted, figure.value, right, figure, why, True)


# --- SGLang and llama.cpp: the bytes of K and V that their pools take --------------------------


def _rate(spec: ModelSpec, part: str, width: int | Fraction) -> int | Fraction:
    """Bytes of one token over all layers: of "K", of "V", or of both as "KV"."""
    of_part = tuple(
        replace(x, key_dim=x.key_dim * ("K" in part), value_dim=x.value_dim * ("V" in part))
        for x in spec.layers
    )
    return costs.kv_bytes_per_token(replace(spec, layers=of_part), width)


def _holds(
    spec: ModelSpec, part: str, tokens: float, page: int, figure: Figure, width: int | Fraction
) -> bool:
    """Do so many tokens, with a page for padding, take the bytes that the log has for the part?"""
    rate = _rate(spec, part, width)
    least, most = tokens * rate - figure.rounding, (tokens + page) * rate + figure.rounding
    return least <= figure.value <= most


def _bytes_check(
    name: str, spec: ModelSpec, tp: int, storage: StorageFormat, part: str, tokens: float,
    page: int, figure: Figure, why: str,
) -> dict:  # fmt: skip
    def agrees(model: ModelSpec, width: int | Fraction) -> bool:
        return _holds(model, part, tokens, page, figure, width)

    rank, width = _stored(spec, tp, storage), storage.bytes_per_element
    predicted, right = float(int(tokens) * _rate(rank, part, width)), agrees(rank, width)
    if not right:
        ratio = figure.value / predicted if predicted else inf
        why = _explain(agrees, spec, tp, storage, ratio)
    return _check(name, "bytes", predicted, figure.value, right, figure, why, True)


def _part(spec: ModelSpec, keep: Callable[[LayerSpec], bool]) -> ModelSpec:
    return replace(spec, layers=tuple(layer for layer in spec.layers if keep(layer)))


def _others_and_windowed(spec: ModelSpec) -> list[ModelSpec]:
    return [_part(spec, lambda x: x.window is None), _part(spec, lambda x: x.window is not None)]


def _sglang(spec: ModelSpec, log: EngineLog, tp: int, storage: StorageFormat) -> list[dict]:
    require(
        log.pools != [],
        "the log's 'KV Cache is allocated' line has no '#tokens: N', and no line says "
        "'max_total_num_tokens=N': add one of them",
    )
    page, width = log.page_size or 1, storage.bytes_per_element

    def fits(part: ModelSpec, pool: Pool) -> int:
        rank, tokens = _stored(part, tp, storage), pool.tokens.value
        return sum(_holds(rank, name, tokens, page, x, width) for name, x in pool.parts)

    parts = [spec]
    if len(log.pools) == 2:  # one for layers with a window, one for the others
        parts = _others_and_windowed(spec)
        require(
            all(part.layers for part in parts),
            f"the log has two pools, and {spec.name} has one kind of layer: is it the right "
            "config, and the log of one engine?",
        )
        parts = max((parts[::-1], parts), key=lambda order: sum(map(fits, order, log.pools)))
    checks = []
    for part, pool in zip(parts, log.pools, strict=True):
        which = f" ({len(part.layers)} layers)" if len(parts) > 1 else ""
        for name, figure in pool.parts:
            checks.append(
                _bytes_check(
                    f"{name} bytes from tokens{which}", part, tp, storage, name,
                    pool.tokens.value, page, figure,
                    "tokens x bytes per token, plus one page for padding; the log's GB are GiB",
                )
            )  # fmt: skip
    total = log.total_tokens
    if total is not None and total is not log.pools[0].tokens:
        tokens = max(int(pool.tokens.value) for pool in log.pools)
        why, right = "the same number, printed by another part", total.value == tokens
        checks.append(
            _check("tokens, said twice", "tokens", tokens, total.value, right, total, why)
        )
    return checks


def _layers_of(spec: ModelSpec, store: Store) -> ModelSpec:
    """The part of the model that a llama.cpp cache of so many layers serves."""
    caching = _part(spec, lambda layer: layer.kind in CACHING_KINDS)
    if store.layers is None:
        return caching
    for part in (caching, *_others_and_windowed(caching)):
        if len(part.layers) == store.layers:
            return part
    raise SheetError(
        f"the log has a cache of {store.layers} layers; {spec.name} has {len(caching.layers)} "
        "layers that cache: is it the right config?"
    )


def _llama_cpp(spec: ModelSpec, log: EngineLog, _tp: int, _storage: StorageFormat) -> list[dict]:
    """Each cache says its own types, and one rank holds it."""
    checks = []
    for store in log.stores:
        part = _layers_of(spec, store)
        for name, figure, kind in (
            ("K", store.key, store.key_type),
            ("V", store.value, store.value_type),
        ):
            storage = storage_format(kind)
            why = f"{store.cells:,} cells x {len(part.layers)} layers, as {storage.name}"
            checks.append(
                _bytes_check(
                    f"{name} bytes from cells", part, 1, storage, name, store.cells, 0, figure, why
                )
            )
    return checks
