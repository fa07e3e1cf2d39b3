"""An inference engine's start-up log -> the few figures that say how large its KV cache is.

Formats, each from the engine's public sources or issue threads:
    vLLM       "# GPU blocks: N" or "# cuda blocks: N" (up to 0.7), two lines "GPU KV cache size: N
               tokens" and "Maximum concurrency for M tokens per request: Cx" (pull 13596), both in
               one (issue 54662)
    SGLang     "KV Cache is allocated. #tokens: N, K size: X GB, V size: Y GB" or "KV size: X GB"
               (its GB is 2^30 bytes), "max_total_num_tokens=N"
    llama.cpp  "KV self size = X MiB, K (f16): ..." and "size = X MiB (N cells, L layers, S seqs), K
               (f16): X MiB, V (f16): Y MiB"; for a latent "c^KV (q8_0): X MiB, kv^T: not used"
               (ikawrakow/ik_llama.cpp#259)
    TensorRT-LLM  "Allocated X GiB for max tokens in paged KV cache (N)", and before 0.9 "Allocate X
               bytes for k/v cache." with "Using N tokens in paged KV cache." (issues 1188, 1400)

Text is searched, never run. Standard library only: the same code runs in the rendered page.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from kvlab.sheet.kv import SheetError, require

MAX_LOG_CHARACTERS = 4_000_000


@dataclass(frozen=True)
class Figure:
    """One figure of a log: its value, half of its last printed digit, and the line it stands in."""

    value: float
    rounding: float
    line: str


@dataclass(frozen=True)
class Store:
    """One cache that llama.cpp allocates: so many cells for so many layers."""

    cells: int
    layers: int | None
    key: Figure | None
    value: Figure | None
    key_type: str
    value_type: str
    total: Figure | None = None  # where the line gives no part for K and V
    recurrent: bool = False


@dataclass(frozen=True)
class Pool:
    """One pool of so many tokens, and their K and V, apart or together (SGLang, TensorRT-LLM)."""

    tokens: Figure
    parts: tuple[tuple[str, Figure], ...]  # ("K", bytes), ("V", bytes) or ("KV", bytes)


@dataclass
class EngineLog:
    """What a log says. A figure that does not stand there is None."""

    engine: str
    available_bytes: Figure | None = None  # what the engine gives to the cache, on one rank
    tokens: Figure | None = None
    blocks: Figure | None = None
    concurrency: Figure | None = None
    max_model_len: int | None = None
    pools: list[Pool] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    block_size: int | None = None
    page_size: int | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    kv_dtype: str | None = None
    version: str | None = None
    ranks_shown: int = 0  # lines about memory: one a rank
    budget: int | None = None  # max_num_batched_tokens
    page_tokens: int | None = None  # the block size that a recurrent state asks for
    state_mode: str | None = None  # none, align or all
    prefix_caching: bool | None = None
    drafts: int | None = None
    draft_method: str = ""  # that keeps no cache outside the config: MTP layers, or none at all
    total_tokens: Figure | None = None  # a second line that repeats the token count


_NUMBER = r"([0-9][0-9,]{0,24}(?:\.[0-9]{1,12})?)"
_SIZES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "GB": 2**30, "MB": 2**20}
_GB = r"\s*(GiB|GB|MiB|MB)"

#: Colours and other orders to a terminal, which may stand between a word and its figure.
_TERMINAL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


def _figure(text: str, scale: int, line: str) -> Figure:
    plain = text.replace(",", "")
    decimals = len(plain.partition(".")[2])
    if not decimals:  # a count is exact, a whole number of GiB is rounded
        return Figure(int(plain) * scale, 0.5 * scale if scale > 1 else 0, line[:300])
    return Figure(float(plain) * scale, 0.5 * 10.0**-decimals * scale, line[:300])


def _line_of(match: re.Match) -> str:
    text, start = match.string, match.string.rfind("\n", 0, match.start()) + 1
    end = text.find("\n", match.end())
    return text[start : end if end >= 0 else None].strip()


#: What shows that several ranks of one engine wrote the log.
_RANKS = re.compile(
    r"\b(?:TP|DP|PP)[0-9]|\b\w*Worker\w*\b|\brank[ =:_]?[0-9]"
    r"|tensor[_-]parallel[_-]size['\"]?\s*[=: ]\s*(?:[2-9]|[1-9][0-9])"
)


def _find(pattern: str, text: str, size_group: int = 0, group: int = 1) -> Figure | None:
    """The figure of the first match. Ranks repeat a line with almost the same figure."""
    figures = [
        _figure(m[group], _SIZES[m[size_group]] if size_group else 1, _line_of(m))
        for m in re.finditer(pattern, text)
    ]
    different = sorted({figure.value for figure in figures})
    if len(different) < 2:
        return figures[0] if figures else None
    shown = ", ".join(f"{value:,.10g}" for value in different)
    require(
        bool(_RANKS.search(text)) and different[-1] <= 1.1 * different[0],
        f"the log gives several values ({shown}) in lines like {figures[0].line!r}: give the "
        "start of one engine on one rank",
    )
    return min(figures, key=lambda figure: figure.value)  # the engine uses the least


def _setting(names: str, values: str, text: str) -> str | None:
    match = re.search(rf"(?:\b(?:{names})['\"]?\s*[=:]\s*|--?(?:{names})\s+)['\"]?({values})", text)
    return match.group(1) if match else None


def _whole(names: str, text: str) -> int | None:
    found = _setting(names, r"[0-9]{1,12}", text)
    return int(found) if found else None


def _dtype(text: str) -> str | None:
    """The KV dtype that a configuration line names; "auto" means the model's own."""
    kv = _setting("kv_cache_dtype|kv-cache-dtype|cache_dtype", r"[A-Za-z0-9_.]+", text)
    name = kv if kv and kv != "auto" else _setting("dtype", r"(?:torch\.)?[A-Za-z0-9_]+", text)
    return None if name == "auto" else name


def _vllm(text: str) -> EngineLog:
    concurrency = rf"[Mm]aximum concurrency for {_NUMBER} tokens per request: {_NUMBER}x"
    longest = _find(concurrency, text)
    forced = re.search(r"kv cache block size to ([0-9]{1,6})", text)  # by an attention backend
    page = re.search(r"etting attention block size to ([0-9]{1,9}) tokens", text)
    version = re.search(r"(?:LLM engine \(|\bversion )v?([0-9]+\.[0-9]+)", text)
    caching = _setting("enable_prefix_caching", "True|False", text)
    memory = rf"Available KV cache memory: {_NUMBER}{_GB}"
    return EngineLog(
        engine="vLLM",
        available_bytes=_find(memory, text, 2)
        or _find(rf"\bkv_cache_size={_NUMBER}{_GB}", text, 2)
        or _find(rf"reserved for KV Cache is {_NUMBER}{_GB}", text, 2),
        tokens=_find(rf"GPU KV cache size: {_NUMBER} tokens", text),
        blocks=_find(rf"(?:#? ?GPU|# (?!CPU)\w+) blocks: {_NUMBER}", text),
        concurrency=_find(concurrency, text, group=2),
        max_model_len=int(longest.value) if longest else None,
        block_size=int(forced[1]) if forced else _whole("block_size|block-size", text),
        tensor_parallel=_whole("tensor_parallel_size|tensor-parallel-size|tp", text)
        or _tagged_ranks(text),
        kv_dtype=_dtype(text),
        version=version[1] if version else None,
        ranks_shown=len(re.findall(memory, text)),
        budget=_whole("max_num_batched_tokens|max-num-batched-tokens", text),
        page_tokens=int(page[1]) if page else None,
        state_mode=_setting("mamba_cache_mode|mamba-cache-mode", "none|align|all", text),
        prefix_caching=None if caching is None else caching == "True",
        drafts=_whole("num_speculative_tokens|num_spec_tokens", text),
        draft_method=_setting("method", r"\w*(?:mtp|ngram|suffix)", text.lower()) or "",
    )


def _tagged_ranks(text: str) -> int | None:
    """Ranks by the tags TP0, TP1, ... of their lines, where no command shows them."""
    tags = {int(n) for n in re.findall(r"\b(?:Worker_)?TP([0-9]{1,3})\b", text)}
    return max(tags) + 1 if tags else None


_POOL = re.compile(rf"KV Cache is allocated\.(?:[^\n]*?#tokens: {_NUMBER})?[^\n]*")
_PART = re.compile(rf"\b(KV|K|V) size: {_NUMBER}{_GB}")


def _pools(text: str, total: Figure | None) -> list[Pool]:
    """The pools of one rank: ranks repeat a line, and a model with windows has two.

    Up to 0.4.3 the line has no tokens of its own: then they are the total of another line.
    """
    pools: dict[tuple, Pool] = {}
    for line in _POOL.finditer(text):
        parts = tuple((m[1], _figure(m[2], _SIZES[m[3]], line[0])) for m in _PART.finditer(line[0]))
        tokens = _figure(line[1], 1, _line_of(line)) if line[1] else total
        if tokens is not None:
            values = tuple((name, figure.value) for name, figure in parts)
            pools.setdefault((tokens.value, values), Pool(tokens, parts))
    require(
        len(pools) <= 2,
        f"the log gives {len(pools)} different pools in lines like 'KV Cache is allocated.': "
        "give the start of one engine on one rank",
    )
    return list(pools.values())


def _sglang(text: str) -> EngineLog:
    total = _find(rf"max_total_num_tokens={_NUMBER}", text)
    return EngineLog(
        engine="SGLang",
        pools=_pools(text, total),
        total_tokens=total,
        max_model_len=_whole("context_len", text),
        page_size=_whole("page_size|page-size", text),
        tensor_parallel=_whole("tp_size|tp-size|tp", text) or _tagged_ranks(text),
        kv_dtype=_dtype(text),
    )


_COUNT = "([0-9]{1,12})"
_CELLS = re.compile(
    rf"size =\s*{_NUMBER} MiB \(\s*{_COUNT} cells,\s*{_COUNT} layers,"
    rf"\s*[0-9]+(?:/{_COUNT})? seqs\)"
    rf"(?:, K \((\w+)\):\s*{_NUMBER} MiB, V \((\w+)\):\s*{_NUMBER} MiB)?"
)
_SELF = re.compile(
    rf"KV self size\s*=\s*{_NUMBER} MiB, (?:K|c\^KV) \((\w+)\):\s*{_NUMBER} MiB,"
    rf" (?:V \((\w+)\):\s*{_NUMBER} MiB|kv\^T: not used)"
)


def _store(cells: int, layers: int | None, match: re.Match, first: int) -> Store:
    """K's type and size and V's type and size stand in four groups, from `first` on."""
    key_type, key, value_type, value = match.groups()[first - 1 :]
    line = _line_of(match)
    if key is None:
        recurrent = "recurrent" in line
        total = _figure(match[1], 2**20, line)
        return Store(cells, layers, None, None, "f16", "f16", total, recurrent)
    values = None if value is None else _figure(value, 2**20, line)  # a latent is both
    return Store(cells, layers, _figure(key, 2**20, line), values, key_type, value_type)


def _llama_cpp(text: str) -> EngineLog:
    stores = [_store(int(m[2]) * int(m[4] or 1), int(m[3]), m, 5) for m in _CELLS.finditer(text)]
    if not stores:
        context = _whole("n_ctx|kv_size|n_ctx_seq|n_ctx_slot", text)
        if context is None:
            raise SheetError(
                "the log has a 'KV self size' line and no 'n_ctx = ...' line: add the one "
                "that says how many tokens the context holds"
            )
        stores = [_store(context, None, m, 2) for m in _SELF.finditer(text)]
    kept = [store for store in stores if store.layers != 0]  # a cache of no layers holds nothing
    dtype = _dtype(text) if any(store.total for store in kept) else None
    return EngineLog(engine="llama.cpp", stores=kept, kv_dtype=dtype)


_PAGED = re.compile(
    rf"Allocated {_NUMBER} (GiB|MiB) for max tokens in paged KV cache \({_COUNT}\)"
    rf"|Allocate {_COUNT} bytes for k/v cache(?s:.*?)Using {_COUNT} tokens in paged KV cache"
)


def _tensorrt(text: str, match: re.Match) -> EngineLog:
    size, unit, tokens, plain, before = match.groups()
    line = _line_of(match)
    held = _figure(size, _SIZES[unit], line) if size else _figure(plain, 1, line)
    pool = Pool(_figure(tokens or before, 1, line), (("KV", held),))
    ranks = _whole("tp_size|tp-size|tensor_parallel_size|world_size|world-size", text)
    return EngineLog("TensorRT-LLM", pools=[pool], tensor_parallel=ranks, kv_dtype=_dtype(text))


def read_log(text: str) -> EngineLog:
    """The figures of a start-up log. Raises SheetError where it holds none of a known engine."""
    filled = isinstance(text, str) and text.strip() != ""
    require(filled, "the log is empty: paste the lines an engine prints when it starts")
    text = _TERMINAL.sub("", text)
    require(
        len(text) <= MAX_LOG_CHARACTERS,
        f"the log has {len(text):,} characters, at most {MAX_LOG_CHARACTERS:,} are read: give "
        "the start-up part alone",
    )
    stages = _whole("pipeline_parallel_size|pipeline-parallel-size|pp_size|pp-size", text)
    if "KV Cache is allocated" in text:
        return replace(_sglang(text), pipeline_parallel=stages)
    if _CELLS.search(text) or _SELF.search(text):
        return _llama_cpp(text)
    if paged := _PAGED.search(text):
        return replace(_tensorrt(text, paged), pipeline_parallel=stages)
    log = replace(_vllm(text), pipeline_parallel=stages)
    require(
        log.tokens is not None or log.blocks is not None,
        "no line about a KV cache was found: expected vLLM's 'GPU KV cache size: N tokens' or "
        "'# GPU blocks: N', SGLang's 'KV Cache is allocated. #tokens: N', llama.cpp's "
        "'KV self size = ...' or 'size = ... MiB (N cells, ...', or TensorRT-LLM's 'Allocated N "
        "GiB for max tokens in paged KV cache (M)'",
    )
    return log
