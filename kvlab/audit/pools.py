"""SGLang's and llama.cpp's figures: the bytes of K and V that their pools take."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from kvlab import costs, kv_costs
from kvlab.audit.checks import AuditError, check, explain
from kvlab.audit.logs import EngineLog, Pool, Store
from kvlab.kv_formats import StorageFormat, storage_format
from kvlab.specs import ModelSpec


def _ratio(reported: float, predicted: float) -> float:
    return reported / predicted if predicted else inf


def _rates(spec: ModelSpec, bytes_per_element) -> tuple:
    """(K bytes, V bytes) of one token over all layers."""
    keys = values = 0
    for count, layer in spec.layer_groups:
        if layer.kind in costs.CACHING_KINDS:
            keys += count * layer.num_kv_heads * layer.key_dim * bytes_per_element
            values += count * layer.num_kv_heads * layer.value_dim * bytes_per_element
    return keys, values


def _holds(spec: ModelSpec, pool: Pool, part: str, page: int, element) -> bool:
    """Do the pool's tokens, with a page for padding, take the bytes that one of its parts has?"""
    keys, values = _rates(spec, element)
    rate, tokens = {"K": keys, "V": values, "KV": keys + values}[part], pool.tokens.value
    figure = dict(pool.parts)[part]
    least, most = tokens * rate - figure.rounding, (tokens + page) * rate + figure.rounding
    return least <= figure.value <= most


def _parts_of(spec: ModelSpec, pools: list[Pool], fits) -> list[ModelSpec]:
    """The layers that each pool serves: all of them, or one pool for windows and one for others."""
    if len(pools) == 1:
        return [spec]
    windowed = replace(spec, layers=tuple(x for x in spec.layers if x.window is not None))
    others = replace(spec, layers=tuple(x for x in spec.layers if x.window is None))
    if not windowed.layers or not others.layers:
        raise AuditError(
            f"the log has two pools, and {spec.name} has one kind of layer: is it the right "
            "config, and the log of one engine?"
        )
    orders = ([windowed, others], [others, windowed])
    return max(orders, key=lambda order: sum(map(fits, order, pools)))


def sglang_checks(spec: ModelSpec, log: EngineLog, tp: int, storage: StorageFormat) -> list[dict]:
    if not log.pools:
        raise AuditError(
            "the log's 'KV Cache is allocated' line has no '#tokens: N', and no line says "
            "'max_total_num_tokens=N': add one of them"
        )
    page, width, checks = log.page_size or 1, storage.bytes_per_element, []

    def fits(part_of: ModelSpec, pool: Pool) -> int:
        rank = kv_costs.per_rank(part_of, tp)
        return sum(_holds(rank, pool, part, page, width) for part, _ in pool.parts)

    for part_of, pool in zip(_parts_of(spec, log.pools, fits), log.pools, strict=True):
        which = f" ({len(part_of.layers)} layers)" if len(log.pools) > 1 else ""
        for part, figure in pool.parts:

            def agrees(model: ModelSpec, element, pool=pool, part=part) -> bool:
                return _holds(model, pool, part, page, element)

            rank = kv_costs.per_rank(part_of, tp)
            keys, values = _rates(rank, width)
            rate = {"K": keys, "V": values, "KV": keys + values}[part]
            predicted, right = float(int(pool.tokens.value) * rate), agrees(rank, width)
            checks.append(
                check(
                    f"{part} bytes from tokens{which}", predicted, figure.value, right,
                    unit="bytes", independent=True, figure=figure,
                    why="tokens x bytes per token, plus one page for padding; the log's GB are GiB"
                    if right
                    else explain(agrees, part_of, tp, storage, _ratio(figure.value, predicted)),
                )
            )  # fmt: skip
    if log.total_tokens is not None and log.total_tokens is not log.pools[0].tokens:
        tokens = max(int(pool.tokens.value) for pool in log.pools)
        checks.append(
            check(
                "tokens, said twice", tokens, log.total_tokens.value,
                log.total_tokens.value == tokens, unit="tokens", independent=False,
                figure=log.total_tokens, why="the same number, printed by another part",
            )
        )  # fmt: skip
    return checks


def _layers_of(spec: ModelSpec, store: Store) -> ModelSpec:
    """The part of the model that a llama.cpp cache of so many layers serves."""
    caching = [x for x in spec.layers if x.kind in costs.CACHING_KINDS]
    if store.layers in (None, len(caching)):
        return replace(spec, layers=tuple(caching))
    for part in (
        [x for x in caching if x.window is None],
        [x for x in caching if x.window is not None],
    ):
        if len(part) == store.layers:
            return replace(spec, layers=tuple(part))
    raise AuditError(
        f"the log has a cache of {store.layers} layers; {spec.name} has {len(caching)} layers that "
        "cache: is it the right config?"
    )


def llama_cpp_checks(spec: ModelSpec, log: EngineLog) -> list[dict]:
    checks = []
    for store in log.stores:
        part = _layers_of(spec, store)
        for name, figure, kind, index in (
            ("K bytes from cells", store.key, store.key_type, 0),
            ("V bytes from cells", store.value, store.value_type, 1),
        ):
            storage = storage_format(kind)

            def agrees(model, element, figure=figure, index=index, cells=store.cells) -> bool:
                need = cells * _rates(model, element)[index]
                return abs(need - figure.value) <= figure.rounding

            width = storage.bytes_per_element
            predicted, right = float(store.cells * _rates(part, width)[index]), agrees(part, width)
            checks.append(
                check(
                    name, predicted, figure.value, right, unit="bytes", independent=True,
                    figure=figure,
                    why=f"{store.cells:,} cells x {len(part.layers)} layers, as {storage.name}"
                    if right
                    else explain(
                        agrees, part, 1, storage, _ratio(figure.value, predicted)
                    ),
                )
            )  # fmt: skip
    return checks
