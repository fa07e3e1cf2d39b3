"""SGLang's and llama.cpp's figures: the bytes of K and V that their pools take."""

from __future__ import annotations

from dataclasses import replace

from kvlab import costs, kv_costs
from kvlab.audit.checks import AuditError, check, explain
from kvlab.audit.logs import EngineLog, Figure, Store
from kvlab.kv_formats import StorageFormat, storage_format
from kvlab.specs import ModelSpec


def _rates(spec: ModelSpec, bytes_per_element) -> tuple:
    """(K bytes, V bytes) of one token over all layers."""
    keys = values = 0
    for count, layer in spec.layer_groups:
        if layer.kind in costs.CACHING_KINDS:
            keys += count * layer.num_kv_heads * layer.key_dim * bytes_per_element
            values += count * layer.num_kv_heads * layer.value_dim * bytes_per_element
    return keys, values


def sglang_checks(spec: ModelSpec, log: EngineLog, tp: int, storage: StorageFormat) -> list[dict]:
    if log.tokens is None:
        raise AuditError("the log's 'KV Cache is allocated' line has no '#tokens: N'")
    tokens, page = int(log.tokens.value), log.page_size or 1
    checks = []

    def one(name: str, figure: Figure, part: str) -> None:
        def need(model: ModelSpec, element) -> float:
            keys, values = _rates(model, element)
            return {"K": keys, "V": values, "KV": keys + values}[part]

        def agrees(model: ModelSpec, element) -> bool:
            rate = need(model, element)
            rows = (tokens, tokens + page)  # the pool keeps a page for padding
            return (
                rows[0] * rate - figure.rounding <= figure.value <= rows[1] * rate + figure.rounding
            )

        rank, width = kv_costs.per_rank(spec, tp), storage.bytes_per_element
        predicted, right = float(tokens * need(rank, width)), agrees(rank, width)
        checks.append(
            check(
                name, predicted, figure.value, right, unit="bytes", independent=True, figure=figure,
                why="tokens x bytes per token, plus one page for padding; the log's GB are GiB"
                if right
                else explain(agrees, spec, tp, storage, figure.value / (predicted or 1)),
            )
        )  # fmt: skip

    for name, figure, part in (
        ("K bytes from tokens", log.key_bytes, "K"),
        ("V bytes from tokens", log.value_bytes, "V"),
        ("KV bytes from tokens", log.kv_bytes, "KV"),
    ):
        if figure is not None:
            one(name, figure, part)
    if log.total_tokens is not None:
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
            storage = storage_format({"f16": "fp16", "f32": "fp32"}.get(kind, kind))

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
                        agrees, part, 1, storage, figure.value / (predicted or 1)
                    ),
                )
            )  # fmt: skip
    return checks
