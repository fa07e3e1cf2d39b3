# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 5. Paged blocks
#
# [**Open in Colab**](https://colab.research.google.com/github/OWNER/kvlab/blob/main/chapters/05_paged_blocks.ipynb)
#
# **How do you give memory to sequences whose length nobody knows, and share what is equal?**
#
# You build the memory manager of a serving engine: a pool of fixed blocks, a table for each
# sequence that says which blocks are its own, and the rules for handing out, sharing, copying,
# finding again and taking back. Then you run the real checkpoint on it, and nothing in its text
# changes.
#
# You need [chapter 2](02_cache_append.ipynb) (what a cache holds and when K and V may be reused)
# and [chapter 4](04_rope_before_write.ipynb) (K is rotated before it is written, so a row of the
# cache can lie anywhere).

# %% tags=["setup", "hide-cell"]
# The same cell in every chapter: installs kvlab where it is missing, as on Colab.
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("kvlab") is None:
    package = "kvlab[checkpoint] @ git+https://github.com/OWNER/kvlab"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", package], check=True)
if "google.colab" in sys.modules:
    sys.modules["google.colab"].output.enable_custom_widget_manager()

# %% [markdown]
# ## The pool
#
# Step through the operations, or press *Play*. A box is a block. A cell in it is a *slot*: room for
# K and V of one token, in every layer. Each sequence has a colour. Press a word to see the way from
# its position to its slot. (The *null block* is one that nobody gets; a *cached* block is free and can
# still be found.) With *Start*, kvlab's own `blocks.py` runs in this page: append, fork and
# free by hand, then break it.

# %%
from kvlab.notebook.widgets import show
from kvlab.notebook.widgets.scenes import Pool

show(Pool())

# %% [markdown]
# Watch for four things: a block is taken only when a token needs it; A and B share the blocks of
# their common beginning; a fork copies one block, and only when it writes; a block that was freed
# is still found again until somebody else gets it. The chapter builds them in this order.

# %% [markdown]
# ## What reserving wastes
#
# The cache of chapter 2 takes `max_len` rows for a sequence when it starts. Most requests stop long
# before that. We draw some lengths, as they are in the middle of a busy minute: many short ones, a
# few long ones.

# %%
import random

from kvlab.notebook.pool_waste import paged_waste, reserved_waste

draw = random.Random(5)
MAX_LEN = 4096
lengths = [min(MAX_LEN, int(draw.lognormvariate(5.5, 1.0))) for _ in range(64)]
print("the first of them:", lengths[:12])

# %%
from kvlab.notebook.display import say
from kvlab.notebook.widgets.practice import Predict

reserved = reserved_waste(lengths, MAX_LEN)
show(
    Predict(
        question=f"{len(lengths)} requests like these each reserve {MAX_LEN} rows. What percentage "
        "of the reserved rows holds no token?",
        answer=100 * reserved.wasted_share,
        unit="%",
        explanation="The mean length is what counts, against the longest length allowed.",
    )
)

# %% [markdown]
# Now cut memory into blocks of `block_size` tokens and give a request as many as its tokens need.
# Only its last block can have room left. If every length is equally likely modulo the block size,
# that is `(block_size - 1) / 2` slots a request, whatever its length.

# %%
from kvlab.notebook.display import table
from kvlab.notebook.pool_waste import expected_waste_per_request

rows = [{"memory": f"reserve {MAX_LEN}", "slots taken": f"{reserved.taken_slots:,}",
         "empty": f"{reserved.wasted_share:.1%}", "empty per request": "", "expected": ""}]

# %%
for block_size in (1, 4, 16, 64, 256):
    waste = paged_waste(lengths, block_size)
    rows.append({
        "memory": f"blocks of {block_size}",
        "slots taken": f"{waste.taken_slots:,}",
        "empty": f"{waste.wasted_share:.1%}",
        "empty per request": f"{waste.wasted_slots / len(lengths):.1f}",
        "expected": f"{expected_waste_per_request(block_size):.1f}",
    })
table(rows, f"{len(lengths)} requests, {sum(lengths):,} tokens")

# %%
from kvlab.notebook.display import figure

sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256]
share_reserved = [100 * reserved.wasted_share] * len(sizes)
share_paged = [100 * paged_waste(lengths, b).wasted_share for b in sizes]

# %%
figure(
    {"reserve to the maximum": (sizes, share_reserved), "paged": (sizes, share_paged)},
    x="block size, tokens",
    y="slots that hold no token, %",
    title="Waste by block size",
    alt="Share of empty slots: high and constant when reserving, small and growing with the block "
    "size when paged",
    colours={"reserve to the maximum": "waste", "paged": "cache"},
    log_x=True,
)

# %% [markdown]
# Small blocks waste less. But a table entry, a lookup and a hash are paid for each block, and a GPU
# reads long runs of memory better than short ones. Sixteen tokens is vLLM's usual choice.

# %% tags=["hide-input"]
from kvlab import costs
from kvlab.configs import preset
from kvlab.notebook.pool_waste import num_that_fit_paged, num_that_fit_reserved
from kvlab.sheet import units

llama = preset("llama-3-8b")
slots = (64 * 2**30) // costs.kv_bytes_per_token(llama)
fit_reserved = num_that_fit_reserved(slots, MAX_LEN)
fit_paged = num_that_fit_paged(slots, 16, lengths * 100)
say(
    f"In blocks of 16, {paged_waste(lengths, 16).wasted_share:.1%} of the slots are empty. In requests: "
    f"{units.both_bytes(64 * 2**30)} hold {slots:,} tokens of Llama-3-8B's K and V in bf16. "
    f"Reserved at {MAX_LEN} rows that is {fit_reserved} requests; in blocks of 16, with lengths like "
    f"these, {fit_paged:,}. A batch that much larger reads the weights once for all of them."
)

# %% [markdown]
# ## From position to slot
#
# A pool is one tensor of blocks, allocated once. A *block table* is a list: entry `i` is the block
# that holds positions `i * block_size` to `(i + 1) * block_size - 1` of one sequence. The way goes
# from position to table entry, to block and offset, to slot. All of it is a division with remainder:

# %%
block_table, block_size = [5, 2, 9], 4


def slot(position):
    entry, offset = divmod(position, block_size)
    return block_table[entry] * block_size + offset


for position in (0, 3, 4, 9):
    print(f"position {position} -> block {block_table[position // block_size]}, "
          f"offset {position % block_size} -> slot {slot(position)}")

# %%
from kvlab.blocks import slot_of
from kvlab.errors import BlockError

assert [slot(p) for p in range(12)] == [slot_of(block_table, block_size, p) for p in range(12)]
try:
    slot_of(block_table, block_size, 12)
except BlockError as error:
    print("refused:", error)

# %% [markdown]
# ## The write side and the read side
#
# Two parts of an engine use the table, and they use it differently. The **write side** has a row of
# new tokens, of any sequences, and one number for each: its slot. That list is the *slot mapping*.
# It scatters. The **read side** has one sequence and walks its table, block by block. Nothing but
# the table connects them.
#
# We build each for one layer, on its own.

# %%
import torch

num_kv_heads, head_dim, num_blocks = 2, 8, 12
pool = torch.full((num_blocks, block_size, num_kv_heads, head_dim), torch.nan)


# %%
def write(pool, key, slot_mapping):
    """Row i of key goes to slot_mapping[i]; a negative slot is padding and goes nowhere."""
    for row, where in zip(key, slot_mapping, strict=True):
        if where >= 0:
            pool[where // block_size, where % block_size] = row


def read(pool, block_table, seq_len):
    """The first seq_len rows of a sequence, in order."""
    return torch.cat([pool[block] for block in block_table])[:seq_len]


# %% [markdown]
# Now they must meet. Two sequences, interleaved in the pool; each is written in ragged pieces and
# read as a whole. The pool is full of NaN, so that a row read from a slot that nobody wrote would
# show.

# %%
generator = torch.Generator().manual_seed(0)
tables = {"A": [5, 2, 9], "B": [7, 1]}
keys = {name: torch.randn(n, num_kv_heads, head_dim, generator=generator)
        for name, n in (("A", 10), ("B", 6))}

# %%
for start, stop in ((0, 4), (4, 5), (5, 6), (6, 10)):
    for name, key in keys.items():
        positions = range(start, min(stop, len(key)))
        slot_mapping = [slot_of(tables[name], block_size, p) for p in positions]
        write(pool, key[start:stop], slot_mapping)

for name, key in keys.items():
    got = read(pool, tables[name], len(key))
    print(name, "read back as written:", torch.equal(got, key))

# %% [markdown]
# kvlab's `PagedKVCache` is this for K and V of every layer. `write` takes the slot mapping, and the
# layout is its own affair: token-major (NHD) and head-major (HND) hold the same bytes in another
# order.

# %%
from dataclasses import replace

from kvlab.paged import PagedKVCache
from kvlab.specs import LayerSpec

layer = LayerSpec("full", num_kv_heads, head_dim, head_dim)
small = replace(preset("smollm2-135m"), num_layers=1, layers=(layer,))

# %%
for layout in ("NHD", "HND"):
    cache = PagedKVCache(small, num_blocks, block_size, layout=layout)
    for name, key in keys.items():
        mapping = [slot_of(tables[name], block_size, p) for p in range(len(key))]
        cache.write(0, key, -key, mapping)
    key, value = cache.read(0, tables["A"], 10)
    same = torch.equal(key, keys["A"]) and torch.equal(value, -keys["A"])
    print(layout, "same rows:", same, " K strides:", cache.key_cache(0).stride())

# %% [markdown]
# A padded batch brings rows that belong to nobody. Engines give them slot -1. In Python, -1 is the
# *last* slot, and the last slot may well be somebody's:

# %%
cache = PagedKVCache(small, num_blocks, block_size)
two_rows = torch.ones(2, num_kv_heads, head_dim)
cache.write(0, two_rows, two_rows, [7, -1])
print("slot 7 written:", bool(cache.key_cache(0)[1, 7 - block_size].any()),
      " last slot touched:", bool(cache.key_cache(0)[-1, -1].any()))

# %% [markdown]
# ## The checkpoint on blocks
#
# Attention itself does not change. It gathers the rows that a table names, and goes on as in
# chapter 2. Here is a cached loop over a pool, by hand, with a table in wild order.

# %%
from kvlab.attention import attention
from kvlab.checkpoint import load

checkpoint = load(dtype=torch.float32)  # on the GPU if there is one; exact enough to compare
model, spec = checkpoint.model, checkpoint.spec
print(checkpoint.source)
prompt_ids = checkpoint.encode("A library keeps its books in any order, because")
cache = PagedKVCache(spec, 32, 4, device=model.device)
my_table = [17, 3, 28, 9, 30, 12, 1, 22]

# %% tags=["nbval-ignore-output"]
# Depends on the machine: yours may differ.
from kvlab.notebook.measure import runtime

print(runtime(model))


# %%
def attend(layer, query, key, value):
    """One sequence: write by slot, read by table."""
    stop = start + len(key)
    cache.write(layer, key, value, [slot_of(my_table, 4, p) for p in range(start, stop)])
    k, v = (x.transpose(0, 1)[None] for x in cache.read(layer, my_table, stop))
    return attention(query[None], k, v)[0]


# %%
start, fed, by_hand = 0, list(prompt_ids), []
for _ in range(12):
    positions = torch.arange(start, start + len(fed), device=model.device)
    tokens = torch.tensor(fed, device=model.device)
    logits = model.forward(tokens, positions, attend, rows="last")
    start += len(fed)
    fed = [int(logits.argmax())]
    by_hand += fed
print(checkpoint.decode(by_hand))

# %%
from kvlab.generate import cached_generate, naive_generate, paged_generate

naive = naive_generate(model, prompt_ids, 12)
assert naive == cached_generate(model, prompt_ids, 12) == by_hand
for block_size in (1, 5, 16, 33):
    assert naive == paged_generate(model, prompt_ids, 12, block_size=block_size)
print("naive = cached = paged, for four block sizes")

# %% [markdown]
# `paged_attention` does the reading for a whole batch: all decoding sequences in one call, prompt
# chunks one by one. It never gathers a slot that was not written. That matters, because memory that
# nobody wrote may hold NaN, and zero times NaN is NaN, so a mask on the scores alone does not help.

# %%
from kvlab.paged import paged_attention

cache = PagedKVCache(small, num_blocks, 4)
cache.key_cache(0).fill_(torch.nan)
cache.value_cache(0).fill_(torch.nan)
for name, key in keys.items():
    cache.write(0, key, key, [slot_of(tables[name], 4, p) for p in range(len(key))])

pools = (cache.key_cache(0), cache.value_cache(0))
query = torch.randn(2, 6, head_dim, generator=generator)
lens, starts = torch.tensor([10, 6]), torch.tensor([0, 1, 2])
out = paged_attention(query, *pools, torch.tensor([[5, 2, 9], [7, 1, 999]]), lens, starts)
print("finite:", bool(out.isfinite().all()), " (entry 999 lies past B's length and is not read)")

# %%
try:
    paged_attention(query, *pools, torch.tensor([[5, 2, 99], [7, 1, 3]]), lens, starts)
except BlockError as error:
    print("refused:", error)

# %% [markdown]
# ## Who owns a block
#
# The pool's bookkeeping needs no tensor. Each block has a reference count, the number of tables
# that name it. Blocks with count 0 stand in the free list. Block 0 is never handed out: it is the
# *null block*, and fills table entries where there is nothing to read.

# %%
from kvlab.blocks import BlockPool

blocks = BlockPool(num_blocks=6, block_size=4)
first = blocks.allocate(2)
print("handed out:", first, " free:", list(blocks.free_list))
for wrong in (lambda: blocks.allocate(4), lambda: blocks.free([first[0], first[0]])):
    try:
        wrong()
    except BlockError as error:
        print("refused:", error)
print("as before:", list(blocks.free_list))

# %% [markdown]
# An error changes nothing: four blocks that are not all there are not taken in part, and a list
# that frees a block twice frees nothing. An engine that lets either pass loses blocks, or gives one
# block to two owners; the second is the worst bug of this chapter, because every shape stays right.
#
# `BlockManager` keeps the tables. It hands out a block exactly when a token needs it.

# %%
from kvlab.request import Request
from kvlab.tables import BlockManager

manager = BlockManager(BlockPool(8, 4))
seq = Request("A", [11, 12, 13])
manager.start(seq, 3)
manager.mark_computed(seq, 3)
for token in (14, 15, 16, 17, 18, 19):
    seq.append(token)  # sampled, and only then fed
    manager.grow(seq, 1)
    manager.mark_computed(seq, 1)
    print(f"length {seq.num_tokens}: table {seq.block_table}")

# %% [markdown]
# Length 4 still fits, length 5 needs a block. K and V of the newest token are written at index
# `length - 1`, so a new block is due when `(length - 1) % block_size == 0`. This is the place where
# most hand-made pools are off by one, in the one direction or the other, because it depends on
# whether the length is counted before or after the token is appended.

# %% [markdown]
# ## Fork, and copy on write
#
# Two samples of one prompt share everything up to the point where they part. A fork copies the
# table and adds one to every count. Nobody may write into a block that two tables name, so the
# first one to write gets a copy. The other one then holds the original alone, and writes in place.

# %%
manager = BlockManager(BlockPool(10, 4))
parent = Request("parent", [1, 2, 3, 4, 5])
manager.start(parent, 5)
manager.mark_computed(parent, 5)
child = manager.fork(parent, "child")
print("after the fork:", parent.block_table, child.block_table)

# %%
for seq, token in ((parent, 6), (child, 7)):
    seq.append(token)
    copies = manager.grow(seq, 1)
    manager.mark_computed(seq, 1)
    print(f"{seq.request_id} writes: block copies {copies}, table {seq.block_table}")

# %% [markdown]
# Three blocks in all, one copy. `grow` does not copy K and V itself; it returns the pairs, and the
# cache does them, K and V, in every layer, before the write. On the checkpoint:

# %%
from kvlab.generate import PagedDecoder

decoder = PagedDecoder(model, num_blocks=32, block_size=4)
parent = decoder.request(prompt_ids)
decoder.prefill(parent)
child = decoder.manager.fork(parent, "child")
for seq, word in ((parent, " nobody"), (child, " everybody")):
    seq.token_ids += checkpoint.encode(word)[:1]

# %%
rows = decoder.forward([(parent, 1), (child, 1)])
for seq, row in zip((parent, child), rows, strict=True):
    alone = naive_generate(model, seq.token_ids, 1)
    print(seq.request_id, "continues as if it were alone:", int(row.argmax()) == alone[0])

# %% [markdown]
# ## Found again: prefix caching
#
# K and V of a block depend on every token up to its end, and on the adapter, and on the images
# (chapter 2's list). So that is its name: a hash of the parent block's hash, its own tokens, and
# those extra things, each *tagged* with its kind. One more goes in on request: a *salt*, which keeps
# tenants apart. Requests with different salts share nothing.

# %%
from kvlab.tables import ROOT_HASH, hash_block

parent_hash = hash_block(ROOT_HASH, (1, 2, 3, 4))
same_tokens_later = hash_block(parent_hash, (1, 2, 3, 4))
print("equal tokens, another place:", same_tokens_later == parent_hash)
adapter, salt = [("adapter", "X")], [("salt", "X")]
same = hash_block(ROOT_HASH, (1,), adapter) == hash_block(ROOT_HASH, (1,), salt)
print("one hash for an adapter X and a salt X:", same)

# %% [markdown]
# In kvlab a block is *published* under its hash when it is full and its K and V are computed, and not
# one moment earlier. Two equal prompts in the same step therefore find nothing of each other. And a hit
# compares the block's own tokens as well, so that a map that has gone stale gives a miss and not
# somebody else's text.

# %%
manager = BlockManager(BlockPool(12, 4))
first = Request("first", list(range(10)))
manager.start(first, 10)
twin = Request("twin", list(range(10)))
print("before the forward, the twin finds", manager.match_prefix(twin).num_tokens, "tokens")
manager.mark_computed(first, 10)
print("after it,", manager.match_prefix(twin).num_tokens, "of", twin.num_tokens)

# %% [markdown]
# The last two tokens lie in a half-full block. It will still change, so it is never shared.
#
# ## Sharing, measured
#
# Many requests begin with the same instructions. We take four questions behind one long text, and
# run them one after the other: once with the prefix cache, once without. First the guess.

# %%
from kvlab.faults.drift import TEXT

instructions = checkpoint.encode(TEXT[:900])
questions = [" Who laughed?", " Who came to help?", " What did the wind move?", " When was it lit?"]
prompts = [instructions + checkpoint.encode(q) for q in questions]


def serve(prefix_caching):
    """Prefill all prompts; they stay resident. Returns the decoder and each one's first token."""
    decoder = PagedDecoder(model, 160, 16, prefix_caching=prefix_caching)
    sequences = [decoder.request(ids) for ids in prompts]
    outputs = [int(decoder.prefill(seq).argmax()) for seq in sequences]
    return decoder, outputs


# %%
from kvlab.blocks import blocks_for

full_blocks = len(instructions) // 16
all_tokens = sum(map(len, prompts))
predicted = all_tokens - (len(prompts) - 1) * full_blocks * 16
show(
    Predict(
        question=f"Four prompts share {len(instructions)} tokens and have {all_tokens} in all. "
        "How many tokens must be computed, with blocks of 16?",
        answer=predicted,
        unit="tokens",
        explanation=f"The first prompt pays for all. The others find {full_blocks} full blocks.",
    )
)

# %%
results = {}
for name, caching in (("each alone", False), ("prefix cache", True)):
    decoder, outputs = serve(caching)
    pool_ = decoder.manager.pool
    results[name] = {
        "tokens computed": decoder.num_tokens_computed,
        "blocks in use": pool_.num_usable_blocks - pool_.num_free_blocks,
        "hit rate": f"{decoder.manager.stats.hit_rate:.0%}",
        "first tokens": outputs,
    }

# %% [markdown]
# The prediction must hold exactly, and the blocks must be those that the lengths ask for.

# %%
assert results["prefix cache"]["tokens computed"] == predicted
assert results["each alone"]["blocks in use"] == sum(blocks_for(len(p), 16) for p in prompts)
same = results["each alone"].pop("first tokens") == results["prefix cache"].pop("first tokens")
table([{"run": name, **row} for name, row in results.items()], "Four prompts, one beginning")
print("the same first tokens:", same)

# %% [markdown]
# Blocks and tokens are exact. Time is another matter. Prefill is bound by arithmetic, so it should
# fall in proportion to the tokens. It saves less than that: attention still reads the cached part,
# and a short forward costs more a token than a long one.

# %% tags=["nbval-ignore-output"]
# A clock: yours will differ.
import pandas as pd

from kvlab.notebook.measure import in_turns

calls = {"alone": lambda: serve(False), "shared": lambda: serve(True)}
clock = in_turns(calls, rounds=2, warm_up=0)
alone_seconds, shared_seconds = map(min, clock.values())  # the machine may be busy with other things
table(
    pd.DataFrame({
        "predicted, by tokens": {"saved": f"{1 - predicted / all_tokens:.0%}"},
        "measured": {"saved": f"{1 - shared_seconds / alone_seconds:.0%}"},
    }),
    "Prefill time saved by sharing",
)

# %% [markdown]
# ## The prompt that is cached to its end
#
# Send the same prompt twice, and let its length be a multiple of the block size. Every block of the
# second one is there. Then there is nothing to compute, so there are no logits, and nothing to
# sample from. At least one token must be computed again, and there are two ways.

# %%
exact = instructions[: 16 * 8]


def send_twice(name, rule):
    """What the second of two equal prompts finds and computes."""
    decoder = PagedDecoder(model, 64, 16, manager=rule)
    right = decoder.prefill(decoder.request(exact)).argmax()
    second, before = decoder.request(exact), decoder.num_tokens_computed
    same = bool(decoder.prefill(second).argmax() == right)
    computed = decoder.num_tokens_computed - before
    return {"rule": name, "found": second.num_found_tokens, "computed": computed,
            "same token": same}


# %%
from kvlab.notebook.policies import TokenRule

rows = [send_twice("block", BlockManager), send_twice("token", TokenRule)]
table(rows, f"A prompt of {len(exact)} tokens, sent twice")

# %% [markdown]
# The block rule gives up the last block, which is simple, and computes a block's worth of tokens.
# It is kvlab's own; the other one is a subclass with one method, `reusable_tokens`.
# The token rule keeps it and computes one. But that one token is written into a block that is
# shared, so it pays with a block copy when somebody else still holds it. After the forward the copy
# turns out to equal the original, is given back, and the two tables meet again.
#
# A hit comes in whole blocks, so the block size also decides what is found at all. For most models a
# block is small beside a prompt. Not for a hybrid one: its engine makes one block as large as the state
# of a recurrent layer, hundreds of tokens, so that both kinds fit one pool. There prompts of a few hundred
# tokens find nothing, and the hit rate of a chat is far below what its shared text suggests.

# %%
from kvlab.blocks import BlockPool
from kvlab.request import Request


def found_when_sent_twice(length, block_size):
    """Tokens that the second of two equal prompts of this length finds."""
    manager = BlockManager(BlockPool(2 * length // block_size + 4, block_size))
    first = Request("first", list(range(length)))
    manager.start(first, length)
    manager.mark_computed(first, length)
    return manager.match_prefix(Request("second", list(range(length)))).num_tokens


rows = [
    {"tokens in the prompt": f"{length:,}"}
    | {f"blocks of {size}": f"{found_when_sent_twice(length, size):,}" for size in (16, 256, 864)}
    for length in (200, 863, 864, 865, 1728, 1729, 2000)
]
table(rows, "Tokens found when a prompt is sent a second time")


# %% [markdown]
# ## Who has to go: eviction
#
# A block that is free and published costs nothing until somebody needs room. Then one has to be
# *evicted*, and the order matters. A chain can only be hit from its head on: without its first
# block, the ones behind it are out of reach. So a table is released in such a way that its tail goes first, and
# among chains the one that was used longest ago. A free block that was never published holds nothing
# to find, and is handed out before all of them. We watch a chain of eight blocks go, under this rule
# and under its opposite: the rule is one method of the pool, `release_order`.

# %%
def reusable(pool):
    """Tokens of a cached prompt that can still be reused, after 0, 1, 2 ... evictions."""
    manager = BlockManager(pool)
    old = Request("old", list(range(32)))
    manager.start(old, 32)
    manager.mark_computed(old, 32)
    manager.release(old)
    again, found = Request("again", [*range(32), 99]), []
    for _ in range(9):
        found.append(manager.match_prefix(again).num_tokens)
        manager.pool.allocate(min(1, manager.pool.num_free_blocks))
    return found


# %%
from kvlab.notebook.policies import HeadFirst

evicted = list(range(9))
pools = {"tail first": BlockPool(9, 4), "head first": HeadFirst(9, 4)}
figure(
    {name: (evicted, reusable(pool)) for name, pool in pools.items()},
    x="blocks evicted",
    y="tokens that can still be reused",
    title="Evicting a chain of eight blocks",
    alt="Reusable tokens fall by one block per eviction when the tail goes first, and to zero at "
    "once when the head goes first",
    kind="steps",
    colours={"tail first": "cache", "head first": "waste"},
)

# %% [markdown]
# Sliding windows turn this upside down. A layer that only ever looks back `window` tokens does not
# need the head. Its early blocks can be freed while the sequence still runs (the null block takes
# their place in the table), and a hole early in a chain does it no harm. For full attention the same
# hole is the end.

# %%
from kvlab.tables import longest_full_hit, longest_hybrid_hit, longest_sliding_hit

there = [True, True, False, True, True]  # blocks of one token; the third was evicted
print("full attention reuses", longest_full_hit(there))
print("a window of 2 reuses", longest_sliding_hit(there, window=2, block_size=1))
print("a model with both kinds", longest_hybrid_hit(there, there, window=2, block_size=1))

# %% [markdown]
# And a sequence in the middle of its run: it holds what its window can still see, no more.

# %%
windowed = BlockManager(BlockPool(12, 4), sliding_window=6)
seq = Request("long", list(range(30)))
windowed.start(seq, 30)
windowed.mark_computed(seq, 30)
print("table of a running windowed sequence:", seq.block_table)

# %% [markdown]
# ## Rules that must always hold
#
# Every usable block is in use or free and never both. A count is the number of table entries that
# name the block. The map from hash to block and the hashes on the blocks are the same relation. And
# two tables share a block only for the same tokens. `check_tables` says which rule is broken, and
# where. kvlab's tests call it after each operation of long random runs.

# %%
from kvlab.errors import IntegrityError
from kvlab.integrity import check_tables

manager = BlockManager(BlockPool(8, 4))
for name, base in (("A", 0), ("B", 50)):
    seq = Request(name, [base + i for i in range(6)])
    manager.start(seq, 6)
    manager.mark_computed(seq, 6)
check_tables(manager)

# %% [markdown]
# All is well. Now we do what a careless engine does, and put a block back while its owner runs.

# %%
manager.pool.free_list[2] = None  # A's second block, back on the free list while A runs
try:
    check_tables(manager)
except IntegrityError as error:
    print(*error.findings, sep="\n")

# %% [markdown]
# ## The bugs of this chapter
#
# None of these raises an error by itself. Each is switched on, and its detector catches it.

# %%
from kvlab.faults import FaultDetected, all_faults, fault

for entry in [f for f in all_faults() if f.layer == "paged"]:
    with fault(entry.name):
        try:
            entry.detect()
            print(f"{entry.name}: not caught")
        except FaultDetected as found:
            print(f"{entry.name}\n    {entry.symptom}\n    caught: {found}\n")

# %% [markdown]
# How much does it matter? We measure four of them on the checkpoint, as chapter 4 did: the distance
# (KL) between the distributions with and without the fault. Two models that agree are at zero.

# %%
from kvlab.faults import get

harm = {}
for name in ("sharers_not_counted", "published_before_computed", "copy_on_write_skipped",
             "block_copy_keys_only"):
    quiet = get(name).measure()
    with fault(name):
        harm[name] = f"about {get(name).measure():.1g}"
    assert quiet < 1e-3
table([{"fault": name, "KL, nats": value} for name, value in harm.items()],
      "What a quiet fault does to the next token")

# %% [markdown]
# ## Exercises
#
# As a page: the [exercises page](../book/progress.md) checks your answers in the browser.
#
# **5.1** A sequence has the block table `[7, 3, 12]`, with blocks of 16 tokens. In which slot of the
# pool are K and V of position 37?

# %%
from kvlab.notebook.exercises import check, status

answer = None  # your answer here
check("5.1", answer)

# %% [markdown]
# <details><summary>Solution of 5.1</summary>
#
# `12 * 16 + 5`. `37 // 16` is 2, the third entry; `37 % 16` is 5, the offset.
#
# </details>
#
# **5.2** Four requests hold 5, 32, 33 and 100 tokens, in blocks of 16. How many slots are taken and
# hold no token? Predict the one with 32 first.

# %%
answer = None  # your answer here
check("5.2", answer)


# %% [markdown]
# <details><summary>Solution of 5.2</summary>
#
# `paged_waste([5, 32, 33, 100], 16).wasted_slots`: `11 + 0 + 15 + 12`. A length that is a multiple
# of the block size wastes nothing.
#
# </details>
#
# **5.3** Write the rule that decides when memory is taken.

# %%
def blocks_needed(computed, new, held, block_size):
    """`computed` tokens are written, `held` blocks are in the table, `new` tokens come next."""


check("5.3", blocks_needed)

# %% [markdown]
# <details><summary>Solution of 5.3</summary>
#
# ```python
# def blocks_needed(computed, new, held, block_size):
#     return max(0, -(-(computed + new) // block_size) - held)
# ```
#
# Floor division and an added 1 looks alike, and asks for a block too many at every exact multiple.
#
# </details>
#
# **5.4** Request 1 has computed two blocks of 4 tokens. In which of these situations may request 2
# read the second of them? (In the list, block 0 and block 1 are places in a request's table, not ids of
# the pool.)

# %%
from kvlab.notebook.exercises.ch05 import SHARING_OPTIONS

print(*SHARING_OPTIONS, sep="\n")
answer = None  # your answer here, a set of names
check("5.4", answer)

# %% [markdown]
# <details><summary>Solution of 5.4</summary>
#
# `{"same tokens, other outputs", "same first 8 tokens, then others", "same tokens, sampled at
# another temperature"}`. What comes after a token does not enter its K and V.
#
# </details>
#
# **5.5** A pool of 5 blocks. Request A ends and releases its blocks `[1, 2, 3]`, then B its blocks
# `[4, 5]`. All five are published. In which order are they handed out again?

# %%
answer = None  # your answer here, a list
check("5.5", answer)

# %% [markdown]
# <details><summary>Solution of 5.5</summary>
#
# `[3, 2, 1, 5, 4]`. The chain that was released first goes first, and inside a chain the tail.
#
# </details>

# %%
status(5)

# %% [markdown]
# ## In the engines
#
# vLLM's pool is `vllm/v1/core/block_pool.py` (at commit c59cb79): `BlockPool` takes its null block
# from the front of a doubly linked free queue, `get_new_blocks` evicts what it hands out, `touch`
# brings a free cached block back into use, and `free_blocks` expects its blocks in eviction order,
# tail first. Hashes are chained over full blocks. Four things differ. vLLM keeps equal blocks apart,
# so that a block table, once written, is only appended to; kvlab gives the twin back, to have one
# owner less to explain. vLLM trusts its hash, sha256 by default, and compares no tokens. It publishes
# a block when its tokens are scheduled (`allocate_slots` in `vllm/v1/core/kv_cache_manager.py`, at
# commit 003df29), so two equal prompts in one step do share: they run in one forward, and in each
# layer K and V of all rows are written before any row reads. And it forks nothing: several samples
# of one prompt are requests of their own, which find the prompt's full blocks by hash.
#
# SGLang says *page* for block, and keeps its prefixes in a tree instead of a map:
# `python/sglang/srt/mem_cache/radix_cache.py` (at commit 006b0e3). An edge of the tree is a run of
# tokens, cut to whole pages; `match_prefix` walks it and splits a node where a match ends inside.
# `lock_ref` is the reference count, and eviction takes leaves, which is the tail first by
# construction. Adapter and salt go into one `extra_key`.
#
# Both need at least one token to compute, and both take the block rule for a prompt that is cached
# to its end. Where SGLang's page is a single token, that gives up one token only.

# %% [markdown]
# ## What it cost, what comes next

# %% tags=["hide-input"]
entries = blocks_for(2048 + 512, 16)
last_block = expected_waste_per_request(16) * costs.kv_bytes_per_token(llama)
say(
    "**What was built**: a pool, block tables, a bookkeeper that shares, copies, finds again and evicts, and "
    "a decoder on top of them that writes the same tokens as the naive loop.",
    f"**What it cost**: the running example ends at {2048 + 512:,} tokens: {entries} table entries, "
    f"{4 * entries:,} bytes at four bytes each, beside "
    f"{units.binary_bytes(costs.kv_bytes(llama, 2048 + 512))} of K and V. On average "
    f"{units.binary_bytes(last_block)} a request lie empty in its last block. And a bookkeeper that "
    f"must never be wrong: {sum(f.layer == 'paged' for f in all_faults())} of its bugs stand above.",
    f"**What it made possible**: {fit_paged:,} requests where {fit_reserved} fitted, and four prompts for "
    f"{predicted} computed tokens instead of {all_tokens}.",
)

# %% [markdown]
# The gather above has a price: it copies all K and V before it multiplies them once. A kernel that follows the block table by itself need not:
# [chapter 6](06_triton_decode_kernel.ipynb).
#
# **References.** Kwon et al. 2023 (PagedAttention) for blocks and copy on write, Zheng et al. 2024
# (SGLang) for prefixes in a radix tree. See the [references page](../book/references.md).
