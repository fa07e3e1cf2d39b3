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
# # 6. Triton decode kernel
#
# [**Open in Colab**](https://colab.research.google.com/github/OWNER/kvlab/blob/main/chapters/06_triton_decode_kernel.ipynb)
#
# **How does a GPU read a paged cache once, and no more than once?**
#
# You write the kernel that decoding spends its attention time in: one query per sequence against
# keys and values that lie in scattered blocks. You derive the softmax that needs no second pass, cut
# a long context into splits that many programs share, and merge their answers exactly. You run it in
# Triton's interpreter on any Linux machine, compile it for GPUs that are not there, and say from its
# bytes how fast it can be.
#
# You need [chapter 5](05_paged_blocks.ipynb): block tables, slots, and paged attention by gather.
# Some Python with `@` decorators; no CUDA. Words: the [glossary](../book/notation.md).

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
# Triton can run a kernel in two ways: compiled for a GPU, or in Python, one program after another.
# It decides when it is first imported. So the choice stands here, before anything else.

# %%
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# %% [markdown]
# ## An idle card
#
# A GPU is some dozens of *multiprocessors*, or more than a hundred. Each has its own arithmetic, a file of
# *registers* (where numbers lie while they are computed with) and a small *shared memory*; K and V lie
# in the large memory outside. A *launch* starts one kernel as many programs. A program stays on one
# multiprocessor, and its elements, the *lanes*, are worked on in *warps* of 32 threads. *Tensor cores* are
# units that multiply small matrices. The *compute capability* is a card's generation: `7.5` is `sm_75`.
#
# A launch of our kernel makes one *program* for each sequence and each KV head. A program walks over
# its keys and values, a *tile* of them (a few dozen) in each turn. With one sequence that is a handful
# of programs on a card with room for hundreds. A square below is a place for one program, a *program
# slot*. We count two on each multiprocessor, so that one program loads while the other computes; more
# may fit. It has nothing to do with the slots of the cache. Set *splits* to *by the rule* and press
# *Play*: now many programs share one context, and the card is busy.

# %%
from kvlab.configs import preset
from kvlab.notebook.widgets import show
from kvlab.notebook.widgets.splits import Splits, launch_facts

llama = preset("llama-3-8b")
show(Splits(llama))

# %% [markdown]
# Two questions follow. How can a program attend to a part of the keys, when a softmax divides by the
# sum over all of them? And how are the parts put together without error?

# %% [markdown]
# ## A softmax in one pass
#
# Attention weighs value $v_i$ by $e^{s_i}$ and divides by the sum. To keep $e^{s_i}$ from
# overflowing one subtracts the largest score first, and the largest is known only at the end. The
# way out: keep a running maximum, and when it grows, shrink what was summed under the old one.
#
# Here are sixteen scores and values, taken four at a time. The five lines in the loop are the whole
# idea of this chapter.

# %%
generator = torch.Generator().manual_seed(0)
scores = 3 * torch.randn(16, generator=generator)
values = torch.randn(16, 8, generator=generator)

top, total, acc = torch.tensor(float("-inf")), torch.tensor(0.0), torch.zeros(8)
for s, v in zip(scores.split(4), values.split(4), strict=True):
    new_top = torch.maximum(top, s.max())
    p, shrink = torch.exp(s - new_top), torch.exp(top - new_top)
    total = total * shrink + p.sum()
    acc = acc * shrink + p @ v
    top = new_top

one_pass = acc / total
print("equal to softmax:", torch.allclose(one_pass, torch.softmax(scores, 0) @ values, atol=1e-6))


# %% [markdown]
# Look at the first turn. The old maximum is minus infinity, `shrink` is zero, and zeros stay zeros.
# No turn is special. Nothing of the size of the context was kept, either: three small things go from
# turn to turn, however many keys there are.

# %% [markdown]
# ## Two halves, one answer
#
# Now let two programs take half of the keys each, knowing nothing of each other. Each divides by its
# own sum, so each answer is a proper average of its own values. What one must know to put them
# together is how much each sum was: its logarithm, the *log-sum-exp*.

# %%
def part(s, v):
    """Attention over some keys: the output, and the logarithm of what it was divided by."""
    lse = torch.logsumexp(s, 0)
    return torch.exp(s - lse) @ v, lse


def merge_halves(out_a, lse_a, out_b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    return out_a * torch.exp(lse_a - lse) + out_b * torch.exp(lse_b - lse), lse


first, second = part(scores[:11], values[:11]), part(scores[11:], values[11:])
merged, lse = merge_halves(*first, *second)
print("equal to the whole:", torch.allclose(merged, one_pass, atol=1e-6))
print("so is the average of the two:", torch.allclose((first[0] + second[0]) / 2, one_pass))

# %% [markdown]
# The merge is exact, for parts of any length and in any order. kvlab's `merge` does it for any
# number of parts. One case needs care: a part without keys has lse minus infinity, and where *all*
# parts are empty, minus infinity less minus infinity is not a number.

# %%
from kvlab.kernels.reference import merge, partial_attention

key = torch.randn(16, 8, generator=generator)
query = torch.randn(3, 8, generator=generator)
cuts = [slice(0, 7), slice(7, 7), slice(7, 16)]  # the middle one is empty
parts = [partial_attention(query, key[cut], values[cut], 0.35) for cut in cuts]
out, _ = merge(torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts]))
print("three parts:", torch.allclose(out, partial_attention(query, key, values, 0.35)[0], atol=1e-6))

nothing, lse = merge(torch.zeros(2, 3, 8), torch.full((2, 3), float("-inf")))
print("two empty parts:", nothing.unique().tolist(), lse.unique().tolist())

# %% [markdown]
# ## From a position to an address
#
# The keys of a sequence lie in blocks, and the block table says in which. A position becomes a table
# entry and an offset, the entry becomes a block id, and the block id becomes an address by the
# tensor's strides. A kernel does this for a whole tile of positions at once.

# %%
BLOCK_SIZE, HEADS, DIM = 4, 2, 8
key_cache = torch.randn(9, BLOCK_SIZE, HEADS, DIM, generator=generator)
value_cache = torch.randn(9, BLOCK_SIZE, HEADS, DIM, generator=generator)
block_table = torch.tensor([5, 2, 7, 0, 0], dtype=torch.int32)
seq_len, kv_head = 10, 1

position = torch.arange(16)  # a tile is wider than what is left of the sequence
visible = position < seq_len
block_id = torch.where(visible, block_table[(position // BLOCK_SIZE).clamp(max=4)], 0).long()
strides = key_cache.stride()
row = block_id * strides[0] + (position % BLOCK_SIZE) * strides[1] + kv_head * strides[2]
keys = key_cache.flatten()[row[visible, None] + torch.arange(DIM)]

# %%
by_hand = key_cache[[5, 2, 7], :, kv_head].flatten(0, 1)[:seq_len]
print("the rows of the block table's blocks:", torch.equal(keys, by_hand))
print("positions masked:", int((~visible).sum()), "of", len(position))

# %% [markdown]
# The mask does more than cut off scores. A masked lane must not *load*: the table entry behind the
# last block may name a foreign block, and a slot that was never written may hold NaN, which a weight of
# zero does not cancel (chapter 5).

# %% [markdown]
# ## What one program reads
#
# `replay` lists it, turn by turn: which entries of the block table are looked up, and which slots
# are loaded. Here is a longer sequence, cut in two. A turn takes 32 positions.

# %%
import pandas as pd

from kvlab.kernels.reference import replay
from kvlab.notebook.display import figure, say, table

TABLE = [6, 11, 3, 8, 1, 9]
rows = []
for split in range(2):
    for turn in replay(TABLE, 16, seq_len=83, split=split, num_splits=2, tile=32):
        rows.append(
            {
                "program (split)": split,
                "positions": f"{turn.positions[0]} to {turn.positions[-1]}",
                "table entries": ", ".join(map(str, turn.table_entries)),
                "blocks": ", ".join(str(TABLE[entry]) for entry in turn.table_entries),
                "slots": f"{turn.slots[0]}, {turn.slots[1]}, ... {turn.slots[-1]}",
                "masked lanes": 32 - len(turn.positions),
            }
        )
table(rows, "Loads of the two programs of one KV head, 83 tokens in blocks of 16")

# %% [markdown]
# Each slot appears once. The last turn is short, and its masked lanes look nothing up. We shall hold
# the kernel itself to this list.

# %% [markdown]
# ## The kernel, piece by piece
#
# A Triton kernel looks like numpy code about one tile. `tl.load` takes an array of addresses and a
# mask, `tl.dot` multiplies small matrices, and `tl.program_id` says which program this is. The code
# shown below is read from kvlab's own file. First, the address of a row: how many elements it lies from
# the cache's start. (Mind two words: the kernel's `slot` is the place *within* a block, chapter 5's offset,
# and its `kv_offset` is this distance.) It is one line, and a mistake in it stays hidden until the pool is
# large.

# %%
import inspect

from kvlab.kernels import paged_decode as kernels


def source(function, start, stop):
    """Show a kernel's lines from the one that holds `start` to the one before `stop`."""
    lines = inspect.getsource(getattr(function, "fn", function)).splitlines()
    first = next(i for i, line in enumerate(lines) if start in line)
    last = next((i for i, line in enumerate(lines) if stop in line and i > first), len(lines))
    kept = [line.removeprefix("    ") for line in lines[first:last]]
    say("```python\n" + "\n".join(kept).rstrip() + "\n```")


# %% tags=["hide-input"]
source(kernels.kv_offset, "return", "nothing")

# %% [markdown]
# Multiply in 32 bits, and from some block id on the product wraps to a negative number. On small
# pools nothing is wrong. The same two products, once in either width:

# %%
from kvlab.kernels.reference import kv_offset

packed_block = 16 * 2 * llama.num_kv_heads * llama.head_dim  # K and V of 16 tokens in one block
last = 2**31 // packed_block - 1
for number in (last, last + 1):
    wide = torch.tensor([number])
    offsets = [kv_offset(ids, 0 * ids, 0, (packed_block, 1, 1)).item() for ids in (wide.int(), wide)]
    print(f"block {number:,}: 32 bits {offsets[0]:,}, 64 bits {offsets[1]:,}")

# %% [markdown]
# So the kernel widens the block id before it multiplies. Next, which positions are this program's.
# Whole tiles are shared out over the splits, so the splits are equal but for the last, and a short
# sequence may leave some splits with nothing. `tl.cdiv` rounds up; in a layer without a window, `window`
# is at least the context.

# %% tags=["hide-input"]
source(kernels.decode_split, "seq = tl.program_id", "# The group's queries")

# %% [markdown]
# All query heads that share a KV head are rows of one tile, so K and V are loaded once for the whole
# group. The tile's sides are powers of two. Rows and lanes beyond the real ones are masked: they are
# zeros, and are never stored.

# %% tags=["hide-input"]
source(kernels.decode_split, "# The group's queries", "if UPCAST")

# %% [markdown]
# Then the loop. It is the address arithmetic from above, two masked loads, and the five lines of the
# online softmax behind the name `FOLD`. `foreign` counts block ids that the pool does not have; their row
# is made NaN at the end. `UPCAST` is for the interpreter only.

# %% tags=["hide-input"]
source(kernels.decode_split, "for start in range(begin", "# A foreign block id")

# %%
source(kernels.fold_tile, "scores = tl.dot", "nothing")

# %% [markdown]
# Compare with the loop at the top of the chapter: the same five steps, after scores and mask, for a group
# of queries. `p` is rounded to the values' dtype because tensor cores multiply 16-bit numbers; the sums
# `total` and `acc` stay in fp32. No tile of the loop is all masked, for each holds a position from `first`
# to `end`, so `new_top` is a number (but for foreign ids). At the end, a split that saw no key must not divide by zero.

# %% tags=["hide-input"]
source(kernels.decode_split, "# An empty split", "row = (seq")

# %% [markdown]
# The second kernel is the merge, one program for each query head of each sequence.

# %% tags=["hide-input"]
source(kernels.merge_splits, "top = tl.max", "out = (acc")

# %% [markdown]
# ## Does it work?
#
# `paged_decode` launches both. Where there is no Triton at all (it has wheels for Linux only), the
# chapter goes on with the same steps in torch, `paged_decode_torch`.

# %%
from kvlab.kernels.choose import choose_backend
from kvlab.kernels.paged_decode import kernel_device, paged_decode
from kvlab.kernels.reference import paged_decode_reference, paged_decode_torch

backend = choose_backend()
runs_on = kernel_device() if kernels.INTERPRETED or backend.name == "triton" else None
decode = paged_decode if runs_on else paged_decode_torch
device = runs_on or "cpu"

# %% tags=["nbval-ignore-output"]
# Depends on the machine: yours may differ.
how = {"cuda": "compiled, on this GPU", "cpu": "in Triton's interpreter", None: "in torch"}
print("kernels of this chapter run", how[runs_on])
print("an engine here decodes with", backend.reason)
print("and loads its weights in", backend.dtype_reason)


# %% [markdown]
# The test case is unkind: seven query heads on one KV head, a head size that is no power of two,
# blocks of five, an empty sequence, and NaN in every slot that holds no token.

# %%
def unkind(seq_lens, heads=7, dim=20, block_size=5):
    """query, caches, tables, lengths; NaN wherever no token was written."""
    needed = [-(-n // block_size) for n in seq_lens]
    ids = torch.randperm(sum(needed) + 2, generator=generator) + 1  # never the null block
    caches = torch.full((2, len(ids) + 1, block_size, 1, dim), float("nan"))
    tables = torch.full((len(seq_lens), max(needed)), 999, dtype=torch.int32)
    for r, n in enumerate(seq_lens):
        tables[r, : needed[r]], ids = ids[: needed[r]], ids[needed[r] :]
        at = torch.arange(n)
        where = tables[r].long()[at // block_size], at % block_size
        caches[0][where], caches[1][where] = torch.randn(2, n, 1, dim, generator=generator)
    query = torch.randn(len(seq_lens), heads, dim, generator=generator)
    case = query, caches[0], caches[1], tables, torch.tensor(seq_lens)
    return tuple(t.to(device) for t in case)


# %%
case = unkind([70, 0, 33, 1])
want, want_lse = paged_decode_reference(*case)  # float64
rows = []
for num_splits in (1, 2, 3, 8):
    out, lse = decode(*case, num_splits=num_splits)
    rows.append(
        {
            "splits": num_splits,
            "equal to float64": torch.allclose(out.double(), want, atol=2e-6),
            "finite": bool(out.isfinite().all()),
            "empty row is 0": not out[1].any(),
            "its lse": lse[1, 0].item(),
        }
    )
table(rows, "The kernel against float64, whatever the number of splits")

# %% [markdown]
# Any number of splits gives the same answer. That is the property to test first: a merge that forgets
# a weight is right with one split and wrong with two.

# %% [markdown]
# ## Every byte once
#
# The interpreter can tell us more than the result: every address that was loaded. We count the bytes
# of K and V that the kernel really read, and set them beside the cost model's figure. Where there is no
# interpreter, the replay stands in.

# %%
from kvlab import costs
from kvlab.kernels.reference import trace_loads
from kvlab.sheet import units
from kvlab.specs import LayerSpec

layer = LayerSpec("full", num_kv_heads=1, key_dim=20, value_dim=20)
planned = int(case[4].sum()) * costs.layer_kv_bytes_per_token(layer, bytes_per_element=4)
if runs_on == "cpu":
    with trace_loads() as trace:
        paged_decode(*case, num_splits=3)
    loaded = trace.bytes_loaded(case[1]) + trace.bytes_loaded(case[2])
else:
    turns = [
        turn for r, n in enumerate(case[4].tolist()) for split in range(3)
        for turn in replay(case[3][r].tolist(), 5, n, split, 3, 32)
    ]
    loaded = sum(len(turn.positions) for turn in turns) * 2 * 20 * 4
assert loaded == planned
print(f"planned {planned:,} bytes, loaded {loaded:,}")

# %% [markdown]
# Not one byte more, with seven query heads: the group shares its loads. And since no address outside
# the visible slots was touched, the NaN around them could not matter.

# %% [markdown]
# ## How many splits?
#
# One split too few leaves part of the card idle, one too many makes partial results that must be
# written, read and merged. First your guess.

# %%
from kvlab.configs import hardware
from kvlab.kernels.splits import split_table
from kvlab.notebook.widgets.practice import Predict

a100 = hardware("a100-80gb")
one = split_table(1, llama.num_kv_heads, 8192, a100.num_multiprocessors, 32)
show(
    Predict(
        question="One sequence of 8192 tokens, Llama-3-8B, an A100: into how many splits?",
        answer=one["chosen_splits"],
        unit="splits",
        explanation="The fewest splits that keep the program slots nearly as busy as the best number "
        "of splits would. Each split more is one more partial result to merge.",
    )
)

# %% tags=["hide-input"]
from kvlab.kernels.splits import FILLED, GOOD_ENOUGH

say(
    f"The rule: with programs for {FILLED:.0%} of the program slots or more, do not split, even if a last "
    "wave is then half empty. Else try each number of splits that makes the longest split shorter, and "
    f"take the smallest that reaches {GOOD_ENOUGH:.0%} of the best one's busy share."
)

# %% [markdown]
# A fixed number would be too small for one sequence and wasteful for many. In this count, more programs
# than slots run in *waves*, one after another. Where more than two fit on a multiprocessor, the waves
# overlap, and the real loss is smaller.

# %%
rows = []
for batch in (1, 2, 4, 8, 16, 32, 64):
    found = split_table(batch, llama.num_kv_heads, 8192, a100.num_multiprocessors, 32)
    alone = split_table(batch, llama.num_kv_heads, 8192, a100.num_multiprocessors, 32, num_splits=1)
    rows.append(
        {
            "sequences": batch,
            "slots busy without a split": f"{alone['efficiency']:.0%}",
            "splits by the rule": found["num_splits"],
            "programs": found["num_programs"],
            "waves": found["num_waves"],
            "slots busy": f"{found['efficiency']:.0%}",
        }
    )
table(rows, f"{llama.name}, 8,192 tokens each, {a100.name}")

# %% [markdown]
# ## The engine decodes through it
#
# The kernel takes what the engine has: the pools of chapter 5, block tables and lengths.
# `KernelPagedAttention` sends every sequence with one query to it, and leaves prompt chunks to torch.
# We run the real checkpoint both ways.

# %%
from kvlab.checkpoint import load, read_weights
from kvlab.engine import Engine
from kvlab.kernels.choose import KernelPagedAttention
from kvlab.model import Decoder
from kvlab.paged import PagedAttention

checkpoint = load(device="cpu")
weights = {name: w.float().to(device) for name, w in read_weights(checkpoint.folder).items()}
model = Decoder(checkpoint.spec, weights)
print(checkpoint.source)

# %%
prompts = [checkpoint.encode(text) for text in ("The capital of France is", "Two and two make")]
texts = {}
for attention in (PagedAttention, KernelPagedAttention if runs_on else PagedAttention):
    engine = Engine(model, num_blocks=17, block_size=8, attention=attention)
    outputs = engine.generate(prompts, 5, progress=False)
    texts[attention.__name__] = [checkpoint.decode(output.token_ids) for output in outputs]
print("both ways the same text:", len({str(text) for text in texts.values()}) == 1)
print(texts["PagedAttention"])

# %% [markdown]
# ## Compiled for cards that are not here
#
# Triton's compiler needs no GPU. The table below is the recorded result of
# `python -m kvlab.kernels.report`; a test compiles everything again and compares. Registers limit how
# many programs share a multiprocessor. *Spills* are values that did not fit into registers and go to
# memory: there must be none. *Async copies* fetch the next tile while this one is computed.

# %%
from kvlab.kernels.report import compile_record

names = {
    "arch": "arch", "cards": "cards", "dtype": "dtype", "registers": "registers",
    "shared_bytes": "shared memory, bytes", "spills": "spills", "tensor_core": "tensor-core instr.",
    "async_copy": "async copies", "loop_instructions": "instr. in the loop",
}
compiled = pd.DataFrame(compile_record())
split_rows = compiled[compiled["kernel"] == "decode_split"].reset_index(drop=True)
version = compiled["triton"].iloc[0]
table(split_rows[list(names)].rename(columns=names), f"The split kernel, Triton {version}")

# %% tags=["hide-input"]
t4_row = split_rows[(split_rows["arch"] == "sm_75") & (split_rows["dtype"] == "fp16")].iloc[0]
a100_row = split_rows[(split_rows["arch"] == "sm_80") & (split_rows["dtype"] == "bf16")].iloc[0]
say(
    f"From sm_80 on the products run on tensor cores ({a100_row['tensor_core']} instructions in the "
    f"code) and the next tile is copied while this one is computed. On the T4 (sm_75) there are "
    f"{t4_row['tensor_core']} of either: Triton no longer supports that card, and falls back to plain "
    f"multiply-adds, at {t4_row['registers']} registers a thread. For fp32 inputs tensor cores are "
    "switched off on purpose, since they would round. "
    # 65,536 registers a multiprocessor; four warps are 128 threads
    f"On the A100 {65536 // (a100_row['registers'] * 128)} programs of four warps fit into a "
    "multiprocessor's registers; the rule above counts on two."
)

# %% [markdown]
# The compiler cannot work in a process that interprets. So `compile_variants` starts another one. This
# compiles one variant here and now:

# %% tags=["nbval-ignore-output"]
# Depends on the machine: yours may differ.
from kvlab.kernels.report import compile_variants

if kernels.triton is None:
    print("Triton is not installed here: the record above was made elsewhere")
else:
    (fresh,) = compile_variants([{"arch": 90, "dtype": "bf16"}])
    print({name: fresh.get(name) for name in ("arch", "dtype", "registers", "spills", "seconds")})

# %% [markdown]
# ## How fast can it be?
#
# Decode attention does little arithmetic for each byte it reads: per KV head, each key and value is
# used once by every query head of the group.

# %%
context = 8192
flops = costs.attention_flops_cached_step(llama, context)
num_bytes = costs.kv_bytes(llama, context)
rows = []
for name in ("t4", "l4", "a100-80gb", "h100-sxm"):
    card = hardware(name)
    vector = card.peak_flops_per_second["fp32"]
    best = card.peak_flops_per_second["fp16"]
    rows.append(
        {
            "card": card.name,
            "attention, FLOP per byte": costs.intensity(flops, num_bytes),
            "card without tensor cores": round(vector / card.bandwidth_bytes_per_second, 1),
            "card with them": round(best / card.bandwidth_bytes_per_second, 1),
        }
    )
table(rows, "Work per byte: what attention has, and where each card stops being bound by memory")

# %% [markdown]
# A cached number has two bytes here, and each query head of the group spends two FLOPs on it, a product
# and a sum. So attention's number is the size of the group, far below every card's, and the kernel is
# bound by memory everywhere, even on the T4 without its tensor cores. Its floor is the bytes of K and V
# over the bandwidth. This is the prediction, per layer:

# %%
shapes = [(batch, s) for s in (2048, 8192, 32768) for batch in (1, 16, 64)]
rows = []
for batch, s in shapes:
    layer_bytes = batch * costs.kv_bytes(llama, s) // llama.num_layers
    row = {"sequences": batch, "tokens each": f"{s:,}", "K and V, MiB": layer_bytes // 2**20}
    for name in ("t4", "l4", "a100-80gb", "h100-sxm"):
        card = hardware(name)
        seconds = costs.memory_seconds(layer_bytes, card.bandwidth_bytes_per_second)
        row[f"{card.name}, µs"] = f"{seconds * 1e6:,.1f}"
    rows.append(row)
table(rows, f"Floor of one layer's decode attention, {llama.name}, 16-bit, datasheet bandwidth")

# %% [markdown]
# Below some ten microseconds the floor says little: a launch itself takes that long. And no kernel
# reaches the datasheet's bandwidth; the fair yardstick is a copy measured on the same card.

# %% [markdown]
# ## Measured
#
# In a clone of the repository, `make gpu` checks the kernel on the GPU it finds, times it against a
# copy, against torch's attention on contiguous K and V, and against FlashInfer where that is installed,
# and writes a record.

# %%
from kvlab.notebook.bench_record import against_roofline, gpu_records

records = gpu_records()
for record in records:
    shapes = against_roofline(record)
    labels = [f"{row['sequences']} x {row['tokens']:,}" for row in shapes]
    figure(
        {
            "bytes over copy bandwidth": (labels, [1e6 * row["predicted_seconds"] for row in shapes]),
            "measured": (labels, [1e6 * row["measured_seconds"] for row in shapes]),
        },
        x="sequences x tokens", y="microseconds", kind="bars", log_y=True,
        title=f"One layer of {llama.name} on {record['hardware']}, {record['date']}",
        alt="Predicted and measured time of the kernel for each shape",
        colours={"bytes over copy bandwidth": "cache", "measured": "one"},
    )
if not records:
    say(
        "**No measurement of this kernel is recorded yet.** Nobody has run the bench on a GPU, and "
        "this page does not guess: the table above is a prediction, and stays one until a record "
        "stands in `data/measurements/`."
    )

# %% [markdown]
# Where this notebook runs on a GPU, the next cells measure three shapes: K and V that one layer of
# the table's model reads, against what the card's own copy moves in that time.

# %%
from statistics import median

from kvlab.notebook.measure import gpu_seconds, gpu_seconds_of_a_copy


def share_of_copy(num_seqs, tokens, copied_per_second, dtype, block_size=16):
    """Bytes of K and V per second that one launch reads, over the copy's bytes per second."""
    num_blocks = num_seqs * tokens // block_size
    like = {"device": "cuda", "dtype": dtype}
    caches = torch.randn(2, num_blocks + 1, block_size, llama.num_kv_heads, llama.head_dim, **like)
    query = torch.randn(num_seqs, llama.num_heads, llama.head_dim, **like)
    tables = (torch.randperm(num_blocks, device="cuda") + 1).int().view(num_seqs, -1)
    lens = torch.full((num_seqs,), tokens, device="cuda", dtype=torch.int32)
    seconds = median(gpu_seconds(lambda: paged_decode(query, *caches, tables, lens)[0]))
    read = 2 * num_seqs * tokens * llama.num_kv_heads * llama.head_dim * dtype.itemsize
    return read / seconds / copied_per_second


# %% tags=["nbval-ignore-output", "gpu"]
# Depends on the machine: yours may differ.
if runs_on == "cuda":
    copied_per_second = 2 * 2**30 / median(gpu_seconds_of_a_copy(2**30))
    print(f"copy: {copied_per_second / 1e9:,.0f} GB/s")
    for num_seqs, tokens in ((1, 8192), (8, 4096), (64, 2048)):
        share = share_of_copy(num_seqs, tokens, copied_per_second, choose_backend().dtype)
        print(f"{num_seqs} x {tokens:,}: {share:.0%} of the copy's bandwidth")
else:
    print("no GPU here: nothing was measured")

# %% [markdown]
# ## The T4
#
# Colab's free card is older than what Triton's maintainers support. The compiler still makes a kernel
# for it, but no promise stands behind it. So kvlab tries: a small case, launched and held against
# float64. If it comes out right the kernel is used, if not torch decodes, and the reason is printed
# either way. The dtype is chosen by compute capability, because `torch.cuda.is_bf16_supported()`
# says yes to an emulation.

# %%
from kvlab.kernels.choose import decide, half_dtype

cases = {
    "T4, small case right": ((7, 5), lambda: None),
    "T4, small case wrong": ((7, 5), lambda: "a small case came out wrong"),
    "L4": ((8, 9), None),
    "no GPU": (None, None),
}
for name, (capability, trial) in cases.items():
    backend, reason = decide(capability, trial)
    dtype = half_dtype(capability)[0] if capability else torch.float32
    print(f"{name}: {backend}, {str(dtype).removeprefix('torch.')}\n    {reason}")

# %% [markdown]
# ## The bugs of this chapter
#
# They are switched on in `paged_decode_torch`, so that they can be seen on any machine. Each is the
# smallest input of a public report.

# %%
from kvlab.faults import FaultDetected, all_faults, fault

for entry in [f for f in all_faults() if f.layer == "kernel"]:
    with fault(entry.name):
        try:
            entry.detect()
            print(f"{entry.name}: not caught")
        except FaultDetected as found:
            print(f"{entry.name}\n    {entry.symptom}\n    caught: {found}\n")

# %% [markdown]
# One more is no bug of a kernel, but of testing one: the interpreter's `tl.dot` multiplies the raw bits
# of bf16 numbers. kvlab widens them there, and checks bf16 on a device when there is one. And a kernel
# that is right in the interpreter may still fail on a GPU. `make gpu` begins with the same
# comparison on the card.

# %% [markdown]
# ## Exercises
#
# As a page: the [exercises page](../book/progress.md) asks the questions, and checks the answers that
# are numbers, in the browser.
#
# **6.1** A running softmax has seen scores up to 2, and its sum of `exp(score - 2)` is 3. Now a tile
# with the scores 4 and 2 comes in. What is the sum now?

# %%
from kvlab.kernels.paged_decode import jit, tl  # noqa: F401  for your functions
from kvlab.notebook.exercises import check, status

answer = None  # your answer here
check("6.1", answer)


# %% [markdown]
# <details><summary>Solution of 6.1</summary>
#
# `3 * exp(2 - 4) + exp(4 - 4) + exp(2 - 4)`. The old sum shrinks, then the new terms are added.
#
# </details>
#
# Exercises 6.2 and 6.3 take Triton functions: decorate them with `@jit` and use `tl`. They are put into
# the real kernel and run. (Plain functions on torch tensors are taken as well.)
#
# **6.2** Fold one tile of keys into the running softmax of a group of queries: `q` `[G, D]`, `k`
# `[N, D]`, `v` `[N, DV]`, `visible` `[N]`. Masked keys must not count.

# %%
@jit
def fold(top, total, acc, q, k, v, visible, scale):
    """The new top, total and acc."""
    return top, total, acc


check("6.2", fold)


# %% [markdown]
# <details><summary>Solution of 6.2</summary>
#
# ```python
# @jit
# def fold(top, total, acc, q, k, v, visible, scale):
#     scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
#     scores = tl.where(visible[None, :], scores, -float("inf"))
#     new_top = tl.maximum(top, tl.max(scores, 1))
#     p = tl.exp(scores - new_top[:, None])
#     shrink = tl.exp(top - new_top)
#     total = total * shrink + tl.sum(p, 1)
#     acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
#     return new_top, total, acc
# ```
#
# </details>
#
# **6.3** Merge two partial outputs `[DV]` over different keys, each with its log-sum-exp `[1]`. An
# empty part is 0 with a log-sum-exp of minus infinity, and so are two of them.

# %%
@jit
def merge_two(out_a, lse_a, out_b, lse_b):
    """The output and the log-sum-exp over all of the keys."""
    return out_a, lse_a


check("6.3", merge_two)

# %% [markdown]
# <details><summary>Solution of 6.3</summary>
#
# ```python
# @jit
# def merge_two(out_a, lse_a, out_b, lse_b):
#     top = tl.maximum(lse_a, lse_b)
#     top = tl.where(top == -float("inf"), 0.0, top)
#     a, b = tl.exp(lse_a - top), tl.exp(lse_b - top)
#     empty = a + b == 0.0
#     total = tl.where(empty, 1.0, a + b)
#     return (out_a * a + out_b * b) / total, tl.where(empty, -float("inf"), top + tl.log(total))
# ```
#
# </details>
#
# **6.4** One sequence, Llama-3-8B, an A100 with two program slots on each multiprocessor (there are
# `a100.num_multiprocessors`). Without splitting, which share of the program slots has work?

# %%
answer = None  # your answer here, from 0 to 1
check("6.4", answer)

# %% [markdown]
# <details><summary>Solution of 6.4</summary>
#
# `llama.num_kv_heads / (2 * a100.num_multiprocessors)`: one program a KV head, two slots a
# multiprocessor.
#
# </details>
#
# **6.5** 16 sequences of 8192 tokens, Llama-3-8B in bf16, an L4 (`hardware("l4")` has its bandwidth).
# How many milliseconds must decode attention take at the least, in one layer?

# %%
answer = None  # your answer here, in milliseconds
check("6.5", answer)

# %% [markdown]
# <details><summary>Solution of 6.5</summary>
#
# `16 * 8192 * costs.kv_bytes_per_token(llama) / llama.num_layers / 300e9 * 1e3`. Bytes of one layer's K
# and V over the bandwidth.
#
# </details>

# %%
status(6)

# %% [markdown]
# ## In the engines
#
# vLLM's nearest relative of our kernel is in `vllm/v1/attention/ops/triton_decode_attention.py` (read
# at commit 5c1551b). `_fwd_kernel_stage1` (L59) is our split kernel: its range of positions in L103-L105, the
# block table, there `Req_to_tokens`, looked up in L114-L121, with `PAGE_SIZE` for the block size.
# `_fwd_grouped_kernel_stage1` packs the query heads of a KV head into a tile of 16, and
# `_fwd_kernel_stage2` is the merge; the log-sum-exp is stored behind each partial output. That file
# serves MLA models. For models with GQA, vLLM's Triton kernel is `kernel_unified_attention` in
# `vllm/v1/attention/ops/triton_unified_attention.py` (read at commit `0013943`): one kernel for prompts
# and decodes, query heads of a KV head in one tile, splits called *segments*, and `reduce_segments` for
# the merge. It keeps each segment's maximum and sum in place of a log-sum-exp. vLLM's usual
# backends, FlashAttention and FlashInfer, do the same in CUDA.
#
# SGLang's is in `python/sglang/srt/layers/attention/triton_ops/decode_attention.py` (read at commit
# 03cd2ec, `_fwd_kernel_stage1` at L45); vLLM's file was adapted from it. It knows no blocks: `kv_indptr`
# and `kv_indices` list every token's slot. The number of splits is a tensor, `num_kv_splits`, with a
# value of its own for each sequence, and a split is whole multiples of `_MIN_BLOCK_KV` (L35). Empty
# splits store nothing.

# %% [markdown]
# ## What it cost, what comes next

# %% tags=["hide-input"]
launch = launch_facts(llama, a100.num_multiprocessors, num_seqs=1, context=8192, splits=0)
unsplit = launch_facts(llama, a100.num_multiprocessors, num_seqs=1, context=8192, splits=1)
say(
    "**What was built**: a kernel that reads each cached key and value once, from wherever it lies, for any "
    "head size and block size. Its answer does not depend on how the work was cut.",
    f"**What it cost**: a second launch for the merge, and partial results: one sequence of {8192:,} tokens on "
    f"an A100 is cut into {launch['splits']} splits, which write "
    f"{units.binary_bytes(launch['part_bytes'])} beside the {units.binary_bytes(launch['kv_bytes'])} "
    f"of K and V that one layer reads ({launch['part_bytes'] / launch['kv_bytes']:.1%}).",
    f"**What it made possible**: {launch['busy']:.0%} of the program slots have work, instead of "
    f"{unsplit['busy']:.0%}. And the gather of chapter 5 is gone: it read K and V, wrote a copy and "
    f"read that, {units.binary_bytes(3 * launch['kv_bytes'])} a layer instead of "
    f"{units.binary_bytes(launch['kv_bytes'])}.",
)

# %% [markdown]
# It also made decoding independent of where a sequence lies in memory. So the engine is free to admit,
# preempt and resume whoever it likes, at every step. [Chapter 7](07_engine_step.ipynb).
#
# **References.** Milakov and Gimelshein 2018 for the online softmax; Dao et al. 2022 for tiles, and
# 2023 for splits over the keys; Kwon et al. 2023 for paged attention; Tillet et al. 2019 for Triton;
# Williams et al. 2009 for the roofline. See the [references page](../book/references.md).
