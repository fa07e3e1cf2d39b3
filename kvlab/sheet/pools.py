"""How engines cut memory into a cache: their rules as data, and vLLM's pool of several groups.

A rule stands once, in data/engine_rules.json, with the version that it holds from and until and
the place where it was read. Where a log does not say its version every rule is tried.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import Any

from kvlab import costs
from kvlab.sheet.kv import require
from kvlab.sheet.logs import EngineLog
from kvlab.specs import DATA_DIR, LayerSpec, ModelSpec


@functools.cache
def engine_rules() -> dict[str, Any]:
    """data/engine_rules.json."""
    return json.loads((DATA_DIR / "engine_rules.json").read_text("utf-8"))


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def rules(engine: str, name: str, version: str | None = None) -> list[Any]:
    """The values that a rule may have in this version of an engine, the likeliest first."""
    found = [r for r in engine_rules()["rules"] if (r["engine"], r["rule"]) == (engine, name)]
    assert found, f"no rule {name} of {engine}"
    if version is not None:
        at = _number(version)
        found = [
            rule for rule in found
            if _number(rule.get("from", "0")) <= at <= _number(rule.get("until", "9999.9"))
        ]  # fmt: skip
    return [rule["value"] for rule in reversed(found)]


def newer_than_the_rules(engine: str, version: str | None) -> str | None:
    """What to say of a log whose engine is newer than the newest version that was read."""
    newest = engine_rules()["newest"].get(engine)
    if version is None or newest is None or _number(version) <= _number(newest):
        return None
    return f"the log is of {engine} {version}; the rules were read up to {newest}: one may differ"


# --- vLLM: one pool of pages of one size, groups of layers of one number ------------------------


@dataclass(frozen=True)
class Group:
    """`copies` groups of layers of one kind; a page of each layer holds `block` tokens."""

    layer: LayerSpec
    copies: int
    block: int


@dataclass(frozen=True)
class GroupedPool:
    """vLLM's pool of a model whose layers differ, and how it counts what a request needs."""

    groups: tuple[Group, ...]
    bytes_per_block: int  # a page of each layer of one group
    budget: int
    mode: str
    drafts: int
    tokens_rule: str

    def needed(self, longest: int) -> int:
        """Blocks that a request of the longest length may hold at once, over all groups."""
        return sum(group.copies * self._pages(group, longest) for group in self.groups)

    def _pages(self, group: Group, longest: int) -> int:
        layer, window = group.layer, group.layer.window
        if layer.kind == "recurrent":
            kept = rules("vLLM", "state_blocks")[0][self.mode]
            return kept + self.drafts if kept else ceil(longest / group.block)
        if window is None:
            return ceil(longest / group.block)
        if layer.kind == "chunked":
            return ceil(min(window + self.budget, longest) / group.block)
        return ceil(min(window - 1 + self.budget, longest) / group.block) + 1

    def figures(self, memory: float, longest: int) -> tuple[int, float]:
        """(tokens, requests of the longest length) that the engine prints for so many bytes."""
        blocks = int(memory // self.bytes_per_block)
        requests = blocks / self.needed(longest)
        if self.tokens_rule == "requests":
            return int(requests * longest), requests
        copies = sum(group.copies for group in self.groups)
        return blocks // copies * min(group.block for group in self.groups), requests

    @property
    def says(self) -> str:
        """The settings that the figures were worked out with."""
        kinds = {group.layer.kind for group in self.groups}
        copies = sum(group.copies for group in self.groups)
        blocks = sorted({group.block for group in self.groups})
        text = f"{copies} groups of layers, pages of {' and '.join(map(str, blocks))} tokens"
        if "recurrent" in kinds:
            text += f", state in mode {self.mode}" + f", {self.drafts} drafts" * bool(self.drafts)
        if kinds & {"sliding", "chunked"}:
            text += f", windows with {self.budget:,} tokens of steps in flight"
        return text


def _state_bytes(layer: LayerSpec, drafts: int) -> int:
    """A recurrent layer's state, its convolution wider by the drafts of a step."""
    total = 0
    for state in layer.state:
        assert state.num_elements is not None, "the caller has asked for known states"
        elements = state.num_elements
        if state.name == "convolution window":
            elements = elements // 3 * (3 + drafts)
        total += elements * (state.bytes_per_element or 2)
    return total


def state_page_tokens(rank: ModelSpec, width: int | Fraction, drafts: int = 0) -> int | None:
    """Tokens of a page that is no smaller than a layer's state; None for a model without one."""
    attending = [layer for layer in rank.layers if layer.kind in ("full", "latent")]
    per_token = [costs.layer_kv_bytes_per_token(layer, width) for layer in attending]
    states = [_state_bytes(x, drafts) for x in rank.layers if x.kind == "recurrent"]
    if not states or not per_token:
        return None
    step = rules("vLLM", "state_page")[0]
    return step * ceil(max(states) / (step * max(per_token)))


def _groups(
    rank: ModelSpec, width: int | Fraction, block: int, ratio: float
) -> tuple[tuple[Group, ...], int]:
    kept = [x for x in rank.layers if x.kind not in ("shared", "none")]
    counts = {layer: kept.count(layer) for layer in dict.fromkeys(kept)}
    rates = {x: costs.layer_kv_bytes_per_token(x, width) for x in counts}
    page = max(block * rate for rate in rates.values())
    least, most = min(counts.values()), max(counts.values())
    size = most if most < least * ratio else least
    groups = tuple(
        Group(layer, ceil(count / size), int(page // rates[layer]) if rates[layer] else block)
        for layer, count in counts.items()
    )
    return groups, int(size * page)


def grouped_pools(rank: ModelSpec, width: int | Fraction, log: EngineLog) -> Iterator[GroupedPool]:
    """Every pool that the log's settings allow, the likeliest first."""
    drafts = log.drafts or 0
    # a layer that attends and carries a state is two to an engine
    split = [
        part for x in rank.layers
        for part in ([replace(x, state=()), LayerSpec("recurrent", state=x.state)]
                     if x.state and x.num_kv_heads else [x])
    ]  # fmt: skip
    model = replace(rank, layers=tuple(split))
    tokens = state_page_tokens(model, width, drafts)
    block = log.page_tokens or max(tokens or 0, log.block_size or rules("vLLM", "block_size")[0])
    modes = [log.state_mode] if log.state_mode else ["align", "none", "all"]
    if log.prefix_caching is False and not log.state_mode:
        modes = ["none"]
    kinds = {layer.kind for layer in model.layers}
    budgets = [log.budget] if log.budget else rules("vLLM", "budgets")[0]
    flights = sorted({n for value in rules("vLLM", "in_flight", log.version) for n in value})
    windowed = bool(kinds & {"sliding", "chunked"})
    for tokens_rule, ratio, mode, steps, budget in itertools.product(
        rules("vLLM", "tokens", log.version),
        rules("vLLM", "group_ratio", log.version),
        modes if "recurrent" in kinds else modes[:1],
        flights if windowed else flights[:1],
        budgets if windowed else budgets[:1],
    ):
        groups, size = _groups(model, width, block, ratio)
        require(size > 0, "blocks: the model keeps nothing per token; is it the right config?")
        yield GroupedPool(groups, size, steps * budget, mode, drafts, tokens_rule)
