"""An engine's start-up log against the cost model: does the cache hold what it should?

Three figures of a log look like a proof and are not: tokens, tokens per request and concurrency
are one division. An independent check sets bytes (or memory) against tokens, because only there
does the model's shape enter. Each check says which kind it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from math import floor, inf

from kvlab import costs
from kvlab.costs import FORMATS, CostError, StorageFormat
from kvlab.sheet.kv import SheetError, asked_model, require, storage_format
from kvlab.sheet.logs import EngineLog, Figure, Pool, Store, read_log
from kvlab.specs import ModelSpec

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
    wrong model. Raises SheetError, CostError or ConfigError where nothing can be compared.
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
    compared = _Compared(spec, tp, storage)
    checks_of = {"vLLM": _vllm_checks, "SGLang": _sglang_checks, "llama.cpp": _llama_cpp_checks}
    checks = checks_of[log.engine](compared, log)
    require(
        bool(checks),
        f"the {log.engine} log has one figure and nothing to set beside it: add the line with "
        "the memory for the cache, or the one with the concurrency",
    )
    rate = costs.kv_bytes_per_token(compared.rank, storage.bytes_per_element)
    independent = any(check["independent"] for check in checks)
    if not independent:
        notes.append("No figure of this log depends on the model's shape.")
    return {
        "engine": log.engine,
        "model": spec.name,
        "tensor_parallel": tp,
        "kv_dtype": storage.name,
        "kv_bytes_per_token_and_rank": float(rate),
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


# --- one check --------------------------------------------------------------------------------


def _check(
    name: str, predicted, figure: Figure, agrees: bool, unit: str, why: str, *,
    reported: float | None = None, independent: bool = False,
) -> dict:  # fmt: skip
    """A row of the audit. independent: the check could have failed for a wrong model."""
    return {
        "name": name,
        "predicted": predicted,
        "reported": figure.value if reported is None else reported,
        "unit": unit,
        "agrees": agrees,
        "independent": independent,
        "line": figure.line,
        "why": why,
    }


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


@dataclass(frozen=True)
class _Compared:
    """What the log is compared with: a model, split over so many ranks, stored in a format."""

    spec: ModelSpec
    ranks: int
    storage: StorageFormat

    @property
    def rank(self) -> ModelSpec:
        return costs.per_rank(self.spec, self.ranks)

    def alternatives(self) -> Iterator[tuple[str, ModelSpec, int | Fraction]]:
        """(what would have to be true, model of a rank, bytes of an element): causes to try."""
        spec, rank, width = self.spec, self.rank, self.storage.bytes_per_element
        for other in (FORMATS[name] for name in ("fp32", "bf16", "fp8", "int4")):
            if other.bytes_per_element != width:
                cause = f"the cache is stored as {other.name}, not {self.storage.name}"
                yield cause, rank, other.bytes_per_element
        for ranks in (1, 2, 4, 8, 16):
            if ranks != self.ranks:
                try:
                    split = costs.per_rank(spec, ranks)
                except CostError:
                    continue  # so many ranks cannot hold this model
                cause = f"the figures are for {ranks} tensor-parallel ranks, not {self.ranks}"
                yield cause, split, width
        if spec.num_heads and spec.hidden_size:
            heads = tuple(replace(x, num_kv_heads=spec.num_heads) for x in spec.layers)
            by_heads = costs.per_rank(replace(spec, layers=heads), self.ranks)
            yield "the cache is sized from query heads", by_heads, width
            derived = spec.hidden_size // spec.num_heads
            narrow = tuple(replace(x, key_dim=derived, value_dim=derived) for x in rank.layers)
            yield "the head size is derived as hidden / heads", replace(rank, layers=narrow), width
        yield "the latent is stored expanded", costs.expanded(rank), width
        yield "the draft (MTP) layers have a cache too", costs.with_mtp(rank), width

    def check(
        self, name: str, predicted, figure: Figure, agrees: Agrees, unit: str, why: str,
        reported: float | None = None,
    ) -> dict:  # fmt: skip
        """A check of the model's shape; where it fails, the assumption that would make it agree."""
        right = agrees(self.rank, self.storage.bytes_per_element)
        if not right:
            causes = [text for text, rank, width in self.alternatives() if agrees(rank, width)]
            given = figure.value if reported is None else reported
            why = (
                f"it would agree if {'; or if '.join(causes)}"
                if causes
                else _no_cause(given / predicted if predicted else inf)
            )
        return _check(
            name, predicted, figure, right, unit, why, reported=reported, independent=True
        )


# --- vLLM: memory, tokens, blocks and concurrency ---------------------------------------------


def _is_uniform(spec: ModelSpec) -> bool:
    """Every cached layer grows without a window, and nothing else is kept."""
    return costs.window_cap_bytes(spec) == 0 and costs.fixed_bytes_per_sequence(spec) == 0


def _vllm_checks(compared: _Compared, log: EngineLog) -> list[dict]:
    block, rank = log.block_size or DEFAULT_BLOCK_SIZE, compared.rank
    figure = log.tokens or log.blocks
    assert figure is not None, "a vLLM log is read only where it has tokens or blocks"
    tokens = figure.value if log.tokens else figure.value * block
    checks = []
    if log.tokens and log.blocks:
        held = costs.pool_tokens(int(log.blocks.value), block)
        why = f"{block} tokens a block: one is the other, multiplied"
        checks.append(
            _check("tokens from blocks", held, log.blocks, held == tokens, "tokens", why,
                   reported=tokens)
        )  # fmt: skip
    if log.available_bytes is not None and _is_uniform(rank):
        checks.append(_tokens_from_memory(compared, log.available_bytes, figure, tokens, block))
    if log.concurrency is not None and log.max_model_len:
        checks.append(_concurrency(compared, log, log.concurrency, tokens, block))
    return checks


def _tokens_from_memory(
    compared: _Compared, memory: Figure, figure: Figure, tokens: float, block: int
) -> dict:
    def most_blocks(model: ModelSpec, element: int | Fraction, num_bytes: float) -> int:
        rate = costs.kv_bytes_per_token(model, element)
        return int(costs.num_blocks(floor(num_bytes), rate, block)) if rate else 0

    def agrees(model: ModelSpec, element: int | Fraction) -> bool:
        fewest = most_blocks(model, element, memory.value - memory.rounding)
        most = most_blocks(model, element, memory.value + memory.rounding)
        return (fewest - 1) * block <= tokens <= most * block  # one block may be kept back

    width = compared.storage.bytes_per_element
    require(
        costs.kv_bytes_per_token(compared.rank, width) > 0,
        "blocks: given a model that keeps nothing per token; expected layers with K and V, "
        "without which a pool has no number of blocks; is it the right config?",
    )
    predicted = costs.pool_tokens(most_blocks(compared.rank, width, memory.value), block)
    why = (
        "memory / bytes per token, in whole blocks, within the rounding of the memory figure and "
        "one reserved block"
    )
    return compared.check(
        "tokens from memory", predicted, figure, agrees, "tokens", why, reported=tokens
    )


def _concurrency(
    compared: _Compared, log: EngineLog, figure: Figure, tokens: float, block: int
) -> dict:
    """Requests of the longest length: a division of tokens, or a sum over a hybrid's groups."""
    rank, width, longest = compared.rank, compared.storage.bytes_per_element, log.max_model_len
    assert longest, "the line with the concurrency has the length too"
    if _is_uniform(rank):
        most = costs.concurrency(tokens, longest)
        least = costs.concurrency(tokens, -(-longest // block) * block)
        agrees = least - figure.rounding - 1e-9 <= figure.value <= most + figure.rounding + 1e-9
        why = "tokens / tokens per request: it says nothing about bytes"
        if not agrees:
            why = "the two figures of the log do not belong together"
        return _check(
            "concurrency from tokens", round(most, 2), figure, agrees, "requests", why
        )  # fmt: skip
    memory, fixed = log.available_bytes, costs.fixed_bytes_per_sequence(rank, width)
    if memory is None or fixed is None:
        why = (
            "a hybrid model: tokens, concurrency and bytes are not one division, and the log has "
            "no memory figure (or the config no state size) to predict it from"
        )
        return _check("concurrency", None, figure, True, "requests", why)
    ideal, padded = (
        float(memory.value / costs.sequence_bytes(model, longest, width))
        for model in (rank, costs.padded_to_full(rank))
    )
    agrees = padded * (1 - HYBRID_SLACK) <= figure.value <= ideal * (1 + HYBRID_SLACK)
    why = (
        f"hybrid groups: between {padded:,.2f} (every layer paged for the whole context) and "
        f"{ideal:,.2f} (each window at its own length)"
    )
    if not agrees:
        why = _no_cause(figure.value / (ideal or 1))
    name, predicted = "concurrency from memory", round(ideal, 2)
    return _check(name, predicted, figure, agrees, "requests", why, independent=True)


# --- SGLang and llama.cpp: the bytes of K and V that their pools take -------------------------


def _rates(spec: ModelSpec, element: int | Fraction) -> dict[str, int | Fraction]:
    """Bytes of one token over all layers: of K, of V, of both."""
    caching = [layer for layer in spec.layers if layer.kind in costs.CACHING_KINDS]
    keys = sum(layer.num_kv_heads * layer.key_dim for layer in caching) * element
    values = sum(layer.num_kv_heads * layer.value_dim for layer in caching) * element
    return {"K": keys, "V": values, "KV": keys + values}


def _pool_agrees(pool: Pool, part: str, page: int) -> Agrees:
    """Do the pool's tokens, with a page for padding, take the bytes that one of its parts has?"""
    tokens, figure = pool.tokens.value, dict(pool.parts)[part]

    def agrees(model: ModelSpec, element: int | Fraction) -> bool:
        rate = _rates(model, element)[part]
        least, most = tokens * rate - figure.rounding, (tokens + page) * rate + figure.rounding
        return least <= figure.value <= most

    return agrees


def _parts_of(compared: _Compared, pools: list[Pool], page: int) -> list[_Compared]:
    """The layers that each pool serves: all of them, or one pool for windows and one for others."""
    if len(pools) == 1:
        return [compared]
    spec, width = compared.spec, compared.storage.bytes_per_element
    windowed = tuple(layer for layer in spec.layers if layer.window is not None)
    others = tuple(layer for layer in spec.layers if layer.window is None)
    require(
        bool(windowed and others),
        f"the log has two pools, and {spec.name} has one kind of layer: is it the right config, "
        "and the log of one engine?",
    )

    def fits(part_of: _Compared, pool: Pool) -> int:
        return sum(_pool_agrees(pool, part, page)(part_of.rank, width) for part, _ in pool.parts)

    halves = [replace(compared, spec=replace(spec, layers=x)) for x in (windowed, others)]
    return max((halves, halves[::-1]), key=lambda order: sum(map(fits, order, pools)))


def _sglang_checks(compared: _Compared, log: EngineLog) -> list[dict]:
    require(
        bool(log.pools),
        "the log's 'KV Cache is allocated' line has no '#tokens: N', and no line says "
        "'max_total_num_tokens=N': add one of them",
    )
    page, width, checks = log.page_size or 1, compared.storage.bytes_per_element, []
    for part_of, pool in zip(_parts_of(compared, log.pools, page), log.pools, strict=True):
        which = f" ({len(part_of.spec.layers)} layers)" if len(log.pools) > 1 else ""
        for part, figure in pool.parts:
            predicted = float(int(pool.tokens.value) * _rates(part_of.rank, width)[part])
            why = "tokens x bytes per token, plus one page for padding; the log's GB are GiB"
            name, agrees = f"{part} bytes from tokens{which}", _pool_agrees(pool, part, page)
            checks.append(part_of.check(name, predicted, figure, agrees, "bytes", why))
    total = log.total_tokens
    if total is not None and total is not log.pools[0].tokens:
        tokens = max(int(pool.tokens.value) for pool in log.pools)
        why = "the same number, printed by another part"
        checks.append(
            _check("tokens, said twice", tokens, total, total.value == tokens, "tokens", why)
        )
    return checks


def _layers_of(spec: ModelSpec, store: Store) -> ModelSpec:
    """The part of the model that a llama.cpp cache of so many layers serves."""
    caching = [layer for layer in spec.layers if layer.kind in costs.CACHING_KINDS]
    growing = [layer for layer in caching if layer.window is None]
    windowed = [layer for layer in caching if layer.window is not None]
    for part in (caching, growing, windowed):
        if store.layers in (None, len(part)):
            return replace(spec, layers=tuple(part))
    raise SheetError(
        f"the log has a cache of {store.layers} layers; {spec.name} has {len(caching)} layers that "
        "cache: is it the right config?"
    )


def _store_agrees(cells: int, part: str, figure: Figure) -> Agrees:
    def agrees(model: ModelSpec, element: int | Fraction) -> bool:
        return abs(cells * _rates(model, element)[part] - figure.value) <= figure.rounding

    return agrees


def _llama_cpp_checks(compared: _Compared, log: EngineLog) -> list[dict]:
    checks = []
    for store in log.stores:
        spec, cells = _layers_of(compared.spec, store), store.cells
        for part, figure, kind in (
            ("K", store.key, store.key_type),
            ("V", store.value, store.value_type),
        ):
            storage = storage_format(kind)
            predicted = float(cells * _rates(spec, storage.bytes_per_element)[part])
            agrees = _store_agrees(cells, part, figure)
            why = f"{cells:,} cells x {len(spec.layers)} layers, as {storage.name}"
            checks.append(
                _Compared(spec, 1, storage).check(
                    f"{part} bytes from cells", predicted, figure, agrees, "bytes", why
                )
            )
    return checks
