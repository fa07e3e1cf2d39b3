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
from kvlab.sheet.pools import (
    GroupedPool,
    grouped_pools,
    newer_than_the_rules,
    rules,
    state_page_tokens,
)
from kvlab.specs import LayerSpec, ModelSpec

#: A check that accepts a wider band of figures than this share proves nothing.
WIDEST_PROOF = 0.1
#: How much less memory another rank may have, as a share, before a log is called wrong.
OTHER_RANK = 0.1
TOLD, UNTOLD, WRONG = "agrees", "cannot be told from this log", "does not agree"
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

    verdict is one of three: "agrees" (a narrow check that could have failed did not), "does not
    agree", "cannot be told from this log". agrees is true if every check does, None where one
    cannot be told and no proof stands beside it; independent is true if a check could have failed
    for a wrong model. Raises SheetError, or CostError for ranks that cannot hold the model.
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
    if "mtp" in log.draft_method:
        spec, said = _with_drafts(spec)
        notes = [note for note in notes if "MTP" not in note] + [said]
    engines = {"vLLM": _vllm, "SGLang": _pools, "TensorRT-LLM": _pools, "llama.cpp": _llama_cpp}
    checks = engines[log.engine](spec, log, tp, storage)
    checks = [_short_of_memory(check, log, tp) for check in checks]
    require(
        checks != [],
        f"the {log.engine} log has one figure and nothing to set beside it: add the line with "
        "the memory for the cache, or the one with the concurrency",
    )
    independent = any(check["independent"] for check in checks)
    if not independent:
        notes.append("No figure of this log depends on the model's shape.")
    if newer := newer_than_the_rules(log.engine, log.version):
        notes.append(newer)
    answers = [check["agrees"] for check in checks]
    verdict = WRONG if False in answers else TOLD if independent else UNTOLD
    agrees = False if False in answers else True if independent or None not in answers else None
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
        "agrees": agrees,
        "verdict": verdict,
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


def _with_drafts(spec: ModelSpec) -> tuple[ModelSpec, str]:
    """The model with its draft layers; where the config names none, one more that attends."""
    attending = [layer for layer in spec.layers if layer.kind in ("full", "latent")]
    drafts = spec.mtp_layers or tuple(replace(layer, state=()) for layer in attending[-1:])
    said = f"{len(drafts)} draft (MTP) layers counted, as the log drafts with them"
    said += ", though the config names none" * (not spec.mtp_layers)
    return costs.with_mtp(replace(spec, mtp_layers=drafts)), said


def _short_of_memory(check: dict, log: EngineLog, tp: int) -> dict:
    """A figure less than the memory holds cannot be judged where the log may not show all of it."""
    memory = log.available_bytes
    if memory is None or check["agrees"] is not False or "memory" not in check["name"]:
        return check
    short = 1 - check["reported"] / (check["predicted"] or check["reported"])
    if short > 0 and log.drafts and not log.draft_method:
        why = "a draft model has a cache in the same memory, and its config is not here"
    elif 0 < short <= OTHER_RANK and log.ranks_shown < tp:
        why = (
            "fits within the memory shown; the engine takes the rank with the least, and another "
            f"rank may have {short * memory.value / 2**30:.2f} GiB less: add the lines of all {tp}"
        )
    else:
        return check
    return check | {"agrees": None, "verdict": UNTOLD, "independent": False, "why": why}


def _stored(spec: ModelSpec, tp: int, storage: StorageFormat) -> ModelSpec:
    """The model as one rank stores it, the scales of its rows included."""
    sparse = any(layer.index_dim and layer.kind == "latent" for layer in spec.layers)
    if sparse and storage.name == "fp8":  # engines store such rows in one way only
        storage = FORMATS["fp8_ds_mla"]
    return costs.with_scales(costs.per_rank(spec, tp), storage)


def _check(
    name: str, unit: str, predicted: float | None, reported: float, agrees: bool | None,
    figure: Figure | None, why: str, independent: bool = False, band: float | None = None,
) -> dict:  # fmt: skip
    """A row of the audit. independent: the check could have failed for a wrong model.

    band is the share of the predicted figure within which a reported one is accepted. A check
    with a wide band refuses what lies outside and proves nothing of what lies inside.
    """
    if independent and agrees and band is not None and band > WIDEST_PROOF:
        agrees, independent = None, False
        why += f"; the band of figures that would agree is {band:.0%} wide: no proof"
    return {
        "name": name,
        "predicted": predicted,
        "reported": reported,
        "unit": unit,
        "agrees": agrees if agrees is None else bool(agrees),
        "verdict": UNTOLD if agrees is None else TOLD if agrees else WRONG,
        "independent": independent and agrees is not None,
        "band": band,
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
    block = log.block_size or rules("vLLM", "block_size")[0]
    rank, width = _stored(spec, tp, storage), storage.bytes_per_element
    figure = log.tokens or log.blocks
    assert figure is not None, "read_log refuses a log of vLLM without tokens and blocks"
    # Every cached layer grows without a window, and nothing else is kept.
    uniform = costs.window_cap_bytes(rank) == 0 and costs.fixed_bytes_per_sequence(rank) == 0
    if not uniform:
        return _grouped(rank, width, log)
    tokens = log.tokens.value if log.tokens else figure.value * block
    checks = []
    if log.tokens and log.blocks:
        held = costs.pool_tokens(int(log.blocks.value), block)
        agrees = log.blocks.value * block == tokens
        why = f"{block} tokens a block: one is the other, multiplied"
        checks.append(_check("tokens from blocks", "tokens", held, tokens, agrees, log.blocks, why))
    if log.available_bytes:
        checks.append(_tokens_from_memory(spec, tp, storage, log, tokens, block, figure))
    if log.concurrency and log.max_model_len:
        checks.append(_concurrency(log.concurrency, log.max_model_len, tokens, block))
    return checks


def _tokens_from_memory(
    spec: ModelSpec, tp: int, storage: StorageFormat, log: EngineLog, tokens: float, block: int,
    figure: Figure,
) -> dict:  # fmt: skip
    memory = log.available_bytes
    assert memory is not None, "the caller has asked"
    longest = log.max_model_len or block
    # Newer versions print requests * longest length: less where that is no multiple of a block.
    rest = Fraction(longest, -(-longest // block) * block)

    def pool(num_bytes: float, model: ModelSpec, width: int | Fraction) -> int:
        rate = costs.kv_bytes_per_token(model, width)
        return int(costs.num_blocks(floor(num_bytes), rate, block)) * block if rate else 0

    def agrees(model: ModelSpec, width: int | Fraction) -> bool:
        least = pool(memory.value - memory.rounding, model, width) - block  # one block kept back
        most = pool(memory.value + memory.rounding, model, width)
        return least <= tokens <= most or int(least * rest) <= tokens <= most * rest

    rank, width = _stored(spec, tp, storage), storage.bytes_per_element
    rate = costs.kv_bytes_per_token(rank, width)
    require(
        rate != 0,
        "blocks: given a model that keeps nothing per token; expected layers with K and V, "
        "without which a pool has no number of blocks; is it the right config?",
    )
    predicted = pool(memory.value, rank, width)
    right = agrees(rank, width)
    why = (
        "memory / bytes per token, in whole blocks, within the rounding of the memory figure and "
        "one reserved block"
    )
    if not right and agrees(costs.with_indexer(rank, width), width):
        right, predicted = True, pool(memory.value, costs.with_indexer(rank, width), width)
        why += "; the indexer's own keys counted"
    elif not right:
        why = _explain(agrees, spec, tp, storage, tokens / (predicted or 1))
    band = float(2 * memory.rounding / memory.value + block / (predicted or 1))
    return _check("tokens from memory", "tokens", predicted, tokens, right, figure, why, True, band)


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


def _grouped(rank: ModelSpec, width: int | Fraction, log: EngineLog) -> list[dict]:
    """A model whose layers differ: pages, tokens and requests of vLLM's pool of groups."""
    checks, memory, longest = [], log.available_bytes, log.max_model_len
    known = costs.fixed_bytes_per_sequence(rank, width) is not None
    if known and log.page_tokens and (page := state_page_tokens(rank, width, log.drafts or 0)):
        figure = Figure(log.page_tokens, 0, f"attention block size {log.page_tokens}")
        why = "the fewest tokens, in multiples of 16, whose K and V are no smaller than a state"
        right: bool | None = page == log.page_tokens
        if not right and log.page_tokens % 16 == 0 and log.page_tokens > page:
            right, why = None, f"{why}; a larger one may have been asked for (--block-size)"
        name = "page from state"
        checks = [_check(name, "tokens", page, figure.value, right, figure, why, True, 16 / page)]
    shown = [(kind, figure) for kind, figure in enumerate((log.tokens, log.concurrency)) if figure]
    if memory is None or longest is None or not known:
        lacks = "no memory figure" if memory is None else "no length of a request"
        why = (
            "a model whose layers differ: tokens, concurrency and bytes are not one division, and "
            f"{lacks if known else 'the config no size of its state'}"
            f"{' stands in the log' if known else ''} to predict it from"
        )
        return checks + [
            _check(("tokens", "concurrency")[kind], ("tokens", "requests")[kind], None,
                   figure.value, None, figure, why)
            for kind, figure in shown
        ]  # fmt: skip
    pools = list(grouped_pools(rank, width, log))

    def reach(pool: GroupedPool, kind: int) -> tuple[float, float]:
        ends = (memory.value - memory.rounding, memory.value + memory.rounding)
        least, most = (pool.figures(end, longest)[kind] for end in ends)
        return least, most

    def agrees(pool: GroupedPool, kind: int, figure: Figure) -> bool:
        least, most = reach(pool, kind)
        return least - figure.rounding - 1e-9 <= figure.value <= most + figure.rounding + 1e-9

    def score(pool: GroupedPool) -> int:
        return sum(agrees(pool, kind, figure) for kind, figure in shown)

    best = max(pools, key=score)
    for kind, figure in shown:
        predicted = best.figures(memory.value, longest)[kind]
        right, why = agrees(best, kind, figure), best.says
        spans = {reach(pool, kind) for pool in pools}
        band = sum(most - least + 2 * figure.rounding for least, most in spans)
        if not right:
            right, why = _unsaid_budget(pools, kind, figure, memory, longest, log, why)
            if right is False:
                why = f"with {best.says}: {_no_cause(figure.value / (predicted or 1))}"
        name, unit = (("tokens", "tokens"), ("concurrency", "requests"))[kind]
        checks.append(
            _check(f"{name} from memory", unit, round(predicted, 2), figure.value, right, figure,
                   why, True, band / (predicted or 1))
        )  # fmt: skip
    return checks


def _unsaid_budget(
    pools: list[GroupedPool], kind: int, figure: Figure, memory: Figure, longest: int,
    log: EngineLog, why: str,
) -> tuple[bool | None, str]:  # fmt: skip
    """(None, why) where another budget of tokens a step would explain the figure, else False."""
    windowed = any(group.layer.window is not None for group in pools[0].groups)
    if log.budget or not windowed:
        return False, why
    for pool in pools:
        ends = [replace(pool, budget=budget) for budget in (longest, 1)]
        least, most = (end.figures(memory.value, longest)[kind] for end in ends)
        if least < most and least <= figure.value <= most:
            asked = "the log does not say max_num_batched_tokens, and some value of it fits: add it"
            return None, asked
    return False, why


# --- SGLang, TensorRT-LLM and llama.cpp: the bytes of K and V that their pools take ------------


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
    indexed = costs.with_indexer(rank, width)
    if indexed is not rank:
        why += "; without the indexer's own keys"
        if not right and agrees(indexed, width):
            predicted, right = float(int(tokens) * _rate(indexed, part, width)), True
            why = why.replace("without", "with")
    band = (2 * figure.rounding / predicted + page / (tokens or 1)) if predicted else None
    if not right:
        ratio = figure.value / predicted if predicted else inf
        why = _explain(agrees, spec, tp, storage, ratio)
    return _check(name, "bytes", predicted, figure.value, right, figure, why, True, band)


def _part(spec: ModelSpec, keep: Callable[[LayerSpec], bool]) -> ModelSpec:
    return replace(spec, layers=tuple(layer for layer in spec.layers if keep(layer)))


def _others_and_windowed(spec: ModelSpec) -> list[ModelSpec]:
    return [_part(spec, lambda x: x.window is None), _part(spec, lambda x: x.window is not None)]


def _pools(spec: ModelSpec, log: EngineLog, tp: int, storage: StorageFormat) -> list[dict]:
    require(
        log.pools != [],
        "the log's 'KV Cache is allocated' line has no '#tokens: N', and no line says "
        "'max_total_num_tokens=N': add one of them",
    )
    sparse = any(layer.index_dim for layer in spec.layers)
    page = log.page_size or rules("SGLang", "sparse_page" if sparse else "page_size")[0]
    width = storage.bytes_per_element

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
    elif len(split := [part for part in _others_and_windowed(spec) if part.layers]) == 2:
        # One pool of two: the log shows no more, or the model's layers share one.
        parts = [max((spec, *split), key=lambda part: fits(part, log.pools[0]))]
    checks, why = [], "tokens x bytes per token"
    why += ", plus one page for padding; the log's GB are GiB" * (log.engine == "SGLang")
    for part, pool in zip(parts, log.pools, strict=True):
        which = f" ({len(part.layers)} layers)" if part is not spec else ""
        which += ", one pool of two" * (part is not spec and len(parts) == 1)
        tokens = pool.tokens.value
        for key, figure in pool.parts:
            name = f"{key} bytes from tokens{which}"
            checks.append(_bytes_check(name, part, tp, storage, key, tokens, page, figure, why))
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


def _llama_cpp(spec: ModelSpec, log: EngineLog, _tp: int, storage: StorageFormat) -> list[dict]:
    """Each cache says its own types, and one rank holds it."""
    checks = []
    for store in log.stores:
        if store.recurrent:
            checks.append(_recurrent_cells(spec, store))
            continue
        part, shown = _layers_of(spec, store), [
            ("K", store.key, store.key_type), ("V", store.value, store.value_type)
        ]  # fmt: skip
        if store.total is not None:
            shown = [("KV", store.total, storage.name)]
        for name, figure, kind in shown:
            if figure is None:  # a latent has no V of its own
                continue
            stored = storage_format(kind)
            why = f"{store.cells:,} cells x {len(part.layers)} layers, as {stored.name}"
            checks.append(
                _bytes_check(
                    f"{name} bytes from cells", part, 1, stored, name, store.cells, 0, figure, why
                )
            )
    return checks


def _recurrent_cells(spec: ModelSpec, store: Store) -> dict:
    """llama.cpp's recurrent memory: a cell a sequence, over the layers that have a state."""
    assert store.total is not None, "a recurrent memory's line has its total"
    width = rules("llama.cpp", "state_bytes")[0]
    states = [state.num_elements for layer in spec.layers for state in layer.state]
    name, figure = "state bytes from cells", store.total
    if not states or None in states:
        why = "the config has no recurrent state of a known size"
        return _check(name, "bytes", None, figure.value, None if states else False, figure, why)
    predicted = store.cells * width * sum(count or 0 for count in states)
    layers = sum(bool(layer.state) for layer in spec.layers)
    right = abs(figure.value - predicted) <= figure.rounding
    why = f"{store.cells:,} cells x the state of {layers} layers, all of it in {width} bytes"
    if not right:
        why = _no_cause(figure.value / predicted)
    band = 2 * figure.rounding / predicted
    return _check(name, "bytes", predicted, figure.value, right, figure, why, True, band)
