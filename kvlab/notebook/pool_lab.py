"""The pool as a laboratory: a list of operations in, the pool after each of them out.

The widget of chapter 5 asks this. The blocks, tables and hashes are kvlab's own; only the model
is missing, since who holds which block does not depend on what the tokens say. Every question is
answered from its operations alone, so nothing is remembered between two of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

from kvlab.blocks import NULL_BLOCK
from kvlab.errors import KvlabError
from kvlab.integrity import table_findings
from kvlab.notebook import NotebookError, require
from kvlab.notebook.policies import EVICTION, FULL_HIT
from kvlab.notebook.simulation import SCENES
from kvlab.request import Request
from kvlab.tables import BlockManager

MAX_BLOCKS, MAX_BLOCK_SIZE, MAX_OPERATIONS, MAX_TOKENS = 48, 16, 80, 64

#: What prompts are cut from: equal beginnings are what prefix caching lives on.
TEXTS: dict[str, list[str]] = {name: text.split() for name, text in SCENES["texts"].items()}

#: Names of operations a question may contain.
OPERATIONS = ("arrive", "append", "fork", "truncate", "free", "preempt", "break")

#: The first thing the widget shows, for 12 blocks of 4: every kind of event once.
TOUR: list[dict] = SCENES["tour"]


def pool_trace(
    operations: Seq[Mapping] | None = None,
    *,
    num_blocks: int = 12,
    block_size: int = 4,
    prefix_caching: bool = True,
    eviction: str = "lru",
    full_hit: str = "block",
    seed: int | None = None,
    length: int = 24,
) -> dict:
    """Run operations and return {"operations", "states"}: one state before, one after each.

    num_blocks   usable blocks; the null block comes on top
    seed         make `length` random operations instead of taking `operations`

    A refused operation is a state too: it changes nothing, and its text is the error's.
    """
    require(
        1 <= num_blocks <= MAX_BLOCKS and 1 <= block_size <= MAX_BLOCK_SIZE,
        f"{num_blocks} blocks of {block_size}: this laboratory takes 1 to {MAX_BLOCKS} blocks "
        f"of 1 to {MAX_BLOCK_SIZE} tokens",
    )
    lab = PoolLab(num_blocks, block_size, prefix_caching, eviction, full_hit)
    chooser = random.Random(seed) if seed is not None else None
    wanted = list(operations or [])
    require(
        max(len(wanted), length) <= MAX_OPERATIONS,
        f"too many operations: at most {MAX_OPERATIONS}, start a new pool",
    )
    states, done = [lab.state("An empty pool. Every block but the null block is free.")], []
    for i in range(length if chooser else len(wanted)):
        operation = lab.random_operation(chooser) if chooser else dict(wanted[i])
        done.append(operation)
        states.append(lab.run(operation))
    return {"operations": done, "states": states}


# -- ways to break a pool by hand, so that check_tables() can be heard -----------------------
# Each is a bug that some engine has had, done directly to the data: no function of kvlab would.

Break = Callable[[BlockManager, int], str]


def _held(manager: BlockManager) -> list[int]:
    return [b.block_id for b in manager.pool.blocks[1:] if b.ref_count > 0]


def _pick(choices: list, number: int, what: str):
    require(choices, f"there is {what} to break; do something else first")
    return choices[number % len(choices)]


def _lose(manager: BlockManager, number: int) -> str:
    block_id = _pick(list(manager.pool.free_list), number, "no free block")
    del manager.pool.free_list[block_id]
    return f"Block {block_id} is taken off the free list and given to nobody."


def _free_in_use(manager: BlockManager, number: int) -> str:
    block_id = _pick(_held(manager), number, "no block in use")
    manager.pool.free_list[block_id] = None
    manager.pool.free_list.move_to_end(block_id, last=False)
    return f"Block {block_id} goes to the front of the free list while it is still in a table."


def _miscount(manager: BlockManager, number: int) -> str:
    block_id = _pick(_held(manager), number, "no block in use")
    manager.pool.blocks[block_id].ref_count += 1
    return f"Block {block_id} counts one holder too many: it can never be freed."


def _wrong_entry(manager: BlockManager, number: int) -> str:
    holders = [seq for seq in manager.requests.values() if seq.block_table]
    seq = _pick(holders, number, "no block table")
    seq.block_table[-1] = manager.pool.num_blocks
    return f"The last table entry of {seq.request_id} names a block past the pool."


def _stale_hash(manager: BlockManager, number: int) -> str:
    block_hash = _pick(list(manager.pool.cached), number, "no published block")
    block_id = manager.pool.cached[block_hash]
    manager.pool.blocks[block_id].prefix = None
    return f"Block {block_id} loses its hash, but the map still leads to it."


def _swap_entries(manager: BlockManager, number: int) -> str:
    holders = [seq for seq in manager.requests.values() if len(seq.block_table) > 1]
    seq = _pick(holders, number, "no table of two blocks")
    table = seq.block_table
    table[0], table[1] = table[1], table[0]
    return f"The first two table entries of {seq.request_id} change places."


#: name -> (what a menu says, what is done)
BREAKS: dict[str, tuple[str, Break]] = {
    "free_in_use": ("free a block that is in use", _free_in_use),
    "miscount": ("count one holder too many", _miscount),
    "lose": ("lose a free block", _lose),
    "wrong_entry": ("a table entry past the pool", _wrong_entry),
    "swap_entries": ("swap two table entries", _swap_entries),
    "stale_hash": ("leave a stale hash in the map", _stale_hash),
}


# -- the laboratory -----------------------------------------------------------------------------


class PoolLab:
    """One pool, the sequences on it with their words, and a text for what happened last."""

    def __init__(
        self, num_blocks: int, block_size: int, prefix_caching: bool, eviction: str, full_hit: str
    ) -> None:
        require(
            eviction in EVICTION and full_hit in FULL_HIT,
            f"eviction {eviction!r}, full_hit {full_hit!r}; choose one of {', '.join(EVICTION)}, "
            f"and one of {', '.join(FULL_HIT)}",
        )
        pool = EVICTION[eviction](num_blocks + 1, block_size)
        self.manager = FULL_HIT[full_hit](pool, prefix_caching=prefix_caching)
        self.live: dict[str, Request] = {}
        self.words: dict[str, list[str]] = {}
        self.names = (chr(ord("A") + i % 26) + str(i // 26 or "") for i in range(10**6))

    def run(self, operation: Mapping) -> dict:
        """Do one operation; errors become the state's text, and findings speak for themselves."""
        kind = str(operation.get("op"))
        require(
            kind in OPERATIONS, f"operation {kind!r}: choose one of {', '.join(OPERATIONS)}"
        )
        arguments = {key: value for key, value in operation.items() if key != "op"}
        try:
            before = self.manager.pool.num_evictions
            text, copies = getattr(self, f"_{kind}")(**arguments)
            evicted = self.manager.pool.num_evictions - before
            text += f" Evicted from the cache: {evicted} block(s)." if evicted else ""
            return self.state(text, copies)
        except KvlabError as error:
            return self.state(f"Refused. {type(error).__name__}: {error}", refused=True)
        except TypeError as error:
            problem = f"operation {kind!r} does not take {arguments}: {error}"
            raise NotebookError(problem) from None
        except (IndexError, KeyError) as error:  # only a pool that was broken by hand gets here
            return self.state(f"The broken pool failed: {error!r}", refused=True)

    def random_operation(self, chooser: random.Random) -> dict:
        """Arrivals and decode steps mostly, with forks, rollbacks and departures between."""
        names = list(self.live)
        kinds = ["arrive"] if not names else [
            *["append"] * 7, *["arrive"] * 3, "fork", "truncate", "free", "free", "preempt",
        ]  # fmt: skip
        kind = chooser.choice(kinds)
        if kind == "arrive":
            text = chooser.choice(list(TEXTS))
            return {"op": kind, "text": text, "length": chooser.randint(3, 13)}
        name = chooser.choice(names)
        if kind == "truncate":
            return {"op": kind, "name": name, "drop": chooser.randint(1, 4)}
        return {"op": kind, "name": name}

    # -- operations: each returns (text, block copies) -----------------------------------

    def _seq(self, name: str) -> Request:
        require(
            name in self.live, f"no sequence {name!r} is here; there are {sorted(self.live)}"
        )
        return self.live[name]

    def _arrive(self, text: str = "story", length: int = 8) -> tuple[str, list]:
        require(
            text in TEXTS and 1 <= length <= len(TEXTS[text]),
            f"text {text!r} with {length} words: texts have up to 14 words",
        )
        base = 100 * list(TEXTS).index(text)
        seq = Request(next(self.names), [base + i for i in range(length)])
        hit = self.manager.match_prefix(seq)
        copies = self.manager.start(seq, seq.num_tokens - hit.num_tokens, hit)
        computed = seq.num_uncomputed_tokens
        self.live[seq.request_id], self.words[seq.request_id] = seq, TEXTS[text][:length]
        self.manager.mark_computed(seq, computed)
        found = f"{hit.num_tokens} tokens found in the cache, " if hit.num_tokens else ""
        return f"{seq.request_id} arrives with {length} tokens: {found}{computed} computed.", copies

    def _append(self, name: str) -> tuple[str, list]:
        seq = self._seq(name)
        require(
            seq.num_tokens < MAX_TOKENS,
            f"{name} has {MAX_TOKENS} tokens, the most that fit this picture",
        )
        held = len(seq.block_table)
        copies = self.manager.grow(seq, 1)  # room first: a refused token is not appended
        seq.append(10_000 + 100 * sum(map(ord, name)) + seq.num_tokens)
        word = f"{name.lower()}{seq.num_tokens}"
        self.words[name].append(word)
        self.manager.mark_computed(seq, 1)
        grew = " into a new block" if len(seq.block_table) > held else ""
        copied = "".join(f" Block {s} is shared: copied to {d} first." for s, d in copies)
        where = f"at position {seq.num_tokens - 1}{grew}"
        return f"{name} appends {word} {where}.{copied}", copies

    def _fork(self, name: str) -> tuple[str, list]:
        seq = self._seq(name)
        child = self.manager.fork(seq, next(self.names))
        self.live[child.request_id], self.words[child.request_id] = child, list(self.words[name])
        shared = len(child.block_table)
        return f"{child.request_id} forks off {name} and shares its {shared} blocks.", []

    def _truncate(self, name: str, drop: int = 1) -> tuple[str, list]:
        seq = self._seq(name)
        self.manager.drop_last(seq, min(drop, seq.num_tokens - 1))
        del self.words[name][seq.num_tokens :]
        return f"{name} goes back to {seq.num_tokens} tokens.", []

    def _free(self, name: str) -> tuple[str, list]:
        seq = self._seq(name)
        self.manager.release(seq)
        del self.live[name]
        return f"{name} ends. Its full blocks stay cached until they are handed out again.", []

    def _preempt(self, name: str) -> tuple[str, list]:
        seq = self._seq(name)
        self.manager.preempt(seq)
        del self.live[name]
        return f"{name} is preempted and leaves: all its blocks go back at once.", []

    def _break(self, what: str, number: int = 1) -> tuple[str, list]:
        ways = ", ".join(BREAKS)
        require(what in BREAKS, f"{what!r} is no way to break a pool; there are {ways}")
        return BREAKS[what][1](self.manager, number), []

    # -- the picture ----------------------------------------------------------------------

    def state(self, text: str, copies: Seq[tuple[int, int]] = (), refused: bool = False) -> dict:
        """Everything that is drawn, in JSON: blocks, free list, sequences, findings, counters."""
        manager, pool = self.manager, self.manager.pool
        bs = manager.block_size
        blocks: list[dict] = [
            {"id": b.block_id, "ref": b.ref_count, "cached": b.prefix is not None,
             "owners": [], "filled": bs if b.prefix else 0}
            for b in pool.blocks
        ]  # fmt: skip
        for seq in self.live.values():
            for index, block_id in enumerate(seq.block_table):
                if NULL_BLOCK < block_id < len(blocks):
                    block = blocks[block_id]
                    block["owners"].append(seq.request_id)
                    filled = min(bs, max(0, seq.num_computed_tokens - index * bs))
                    block["filled"] = max(block["filled"], filled)
        stats = manager.stats
        return {
            "text": text,
            "refused": refused,
            "copies": [list(pair) for pair in copies],
            "blocks": blocks,
            "free": list(pool.free_list),
            "sequences": [
                {"name": s.request_id, "words": list(self.words[s.request_id]),
                 "computed": s.num_computed_tokens, "table": list(s.block_table)}
                for s in self.live.values()
            ],
            "findings": table_findings(manager),
            "counts": {
                "in_use": pool.num_usable_blocks - pool.num_free_blocks,
                "free": pool.num_free_blocks,
                "cached": pool.num_evictable_blocks,
                "evictions": pool.num_evictions,
                "hit_tokens": stats.hit_tokens,
                "queried_tokens": stats.queried_tokens,
            },
        }  # fmt: skip
