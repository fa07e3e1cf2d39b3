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
# # 8. Bytes and the roofline
#
# [**Open in Colab**](https://colab.research.google.com/github/OWNER/kvlab/blob/main/chapters/08_bytes_and_roofline.ipynb)
#
# **The cache removed almost all arithmetic. What is the machine still waiting for?**
#
# You count what a decode step computes and what it moves, to the unit. You set both under the two
# roofs of a machine, and predict tokens per second before you measure them. The gap between the
# two gets a name and a size. In the end you can say of any new technique which bytes it attacks,
# and what it can gain at most.
#
# You need [chapter 2](02_cache_append.ipynb) (the cached step), [chapter 3](03_gqa_shapes.ipynb)
# (bytes per token) and, for the batches, [chapter 7](07_engine_step.ipynb).

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
# ## One step in two numbers
#
# Llama-3-8B, bf16, one sequence, in the middle of the running example. First what the step
# computes, then what it must read.

# %%
from kvlab import costs
from kvlab.configs import hardware, preset
from kvlab.notebook.display import figure, say, table
from kvlab.sheet import units

llama, card = preset("llama-3-8b"), hardware("h100-sxm")
P = 8_030_000_000  # coarse accounting, as on the model card
s = 2304

flops = 2 * P + 4 * llama.num_heads * llama.head_dim * llama.num_layers * s
num_bytes = 2 * P + s * 131_072

# %% tags=["hide-input"]
peak, bandwidth = card.peak_flops_per_second["bf16"], card.bandwidth_bytes_per_second
uncached = costs.uncached_step_flops(llama, P, s)
figure(
    {
        "read the bytes": (
            ["cached step", "uncached step"],
            [1e3 * num_bytes / bandwidth, 1e3 * costs.weight_bytes(P) / bandwidth],
        ),
        "do the arithmetic": (
            ["cached step", "uncached step"],
            [1e3 * flops / peak, 1e3 * uncached / peak],
        ),
    },
    x=f"one step of Llama-3-8B at s = {s:,}, bf16, coarse accounting",
    y="milliseconds at least",
    title=f"What an {card.name} needs for one step",
    alt=f"On an {card.name} the cached step takes long to read and almost no time to compute; the "
    "uncached step reads as long and computes far longer",
    kind="bars",
    log_y=True,
    colours={"read the bytes": "weights", "do the arithmetic": "one"},
)
say(
    f"The cached step computes **{units.flops(flops)}** and reads "
    f"**{units.decimal_bytes(num_bytes)}**: {flops / num_bytes:.3f} FLOP for each byte. The card "
    f"could do the arithmetic in {units.seconds(flops / peak)}. It needs "
    f"{units.seconds(num_bytes / bandwidth)} to read the bytes: "
    f"{num_bytes / bandwidth / (flops / peak):,.0f} times as long."
)


# %% [markdown]
# So the arithmetic units stand idle for almost the whole cached step. Nobody would have built such
# a program on purpose. It is what remains after the cache has deleted the repeated work: the same
# weights still have to come past, for one token instead of thousands.

# %% [markdown]
# ## Two roofs
#
# Arithmetic and memory work at the same time, so a step takes at least as long as the slower of the two
# (`step_seconds`). Divide its FLOPs by that time, and it is a rate (`attainable`): below a certain number
# of FLOPs per byte, the *intensity*, the bandwidth is the limit, above it the peak. That corner is the
# *ridge*.

# %%
def step_seconds(flops, num_bytes, peak, bandwidth):
    return max(flops / peak, num_bytes / bandwidth)


def attainable(intensity, peak, bandwidth):
    return min(peak, intensity * bandwidth)


# %%
assert step_seconds(flops, num_bytes, peak, bandwidth) == costs.roofline_seconds(
    flops, num_bytes, peak, bandwidth
)
assert flops == costs.batch_step_flops(llama, P, 1, s)
assert num_bytes == costs.batch_step_bytes(llama, P, 1, s)
print("by hand = kvlab.costs")

# %%
cards = ["h100-sxm", "h100-pcie", "h200-sxm", "a100-80gb", "a100-40gb", "l4", "t4", "rtx-4090"]
rows = []
for name in cards:
    device = hardware(name)
    half = device.peak_flops_per_second.get("bf16") or device.peak_flops_per_second["fp16"]
    seconds = costs.memory_seconds(num_bytes, device.bandwidth_bytes_per_second)
    rows.append(
        {
            "card": device.name,
            "bandwidth": units.decimal_bytes(device.bandwidth_bytes_per_second) + "/s",
            "16-bit peak": units.flops(half) + "/s",
            "ridge, FLOP/byte": f"{half / device.bandwidth_bytes_per_second:,.0f}",
            "tokens per second, at most": f"{1 / seconds:,.0f}",
        }
    )
table(
    rows,
    "Datasheet roofs, and one cached step of Llama-3-8B at s = 2,304",
    "Rates for dense matrices; datasheets also print twice as much, for matrices half of zeros. A card too small for the model is listed for its bandwidth only.",
)

# %% [markdown]
# Every card in the table has its ridge at hundreds of FLOPs per byte. A cached step has one. The
# uncached step of chapter 1 lies on the other side: see the first figure.

# %% [markdown]
# Deleting arithmetic moved the step from one side of the roofline to the other. That is why the
# gain in time is far smaller than the gain in FLOPs.
#
# In the picture, A is the uncached step, B the cached one, C a batch. Press *Play*: A slides up in
# arithmetic as the context grows, B hardly moves, C drifts left as KV joins the weights. Then
# change the card, and raise the batch until C leaves the slope. It may not get there: see the note
# under the table.

# %%
from kvlab.notebook.widgets import show
from kvlab.notebook.widgets.costs import Roofline

show(Roofline())

# %% [markdown]
# ## Counted, not believed
#
# Formulas can be wrong by a factor of two for years. So count. torch can record every operator of a
# forward with its shapes and add up the multiplications and additions. We run the real checkpoint
# four ways and compare to the unit.

# %%
import torch

from kvlab.attention import CachedAttention, UncachedAttention
from kvlab.cache import ContiguousKVCache
from kvlab.checkpoint import load
from kvlab.notebook.measure import count_flops

checkpoint = load(dtype=torch.float32)  # on the GPU if there is one; exact enough to compare
model, spec = checkpoint.model, checkpoint.spec
print(checkpoint.source)

# %% tags=["nbval-ignore-output"]
# Depends on the machine: yours may differ.
from kvlab.notebook.measure import runtime

print(runtime(model))


# %%
def forward(num_new, cached, rows):
    """One forward of num_new tokens behind `cached` ones; None: no cache at all."""
    start = cached or 0
    ids = torch.arange(1, num_new + 1, device=model.device).view(1, -1)
    positions = torch.arange(start, start + num_new, device=model.device).view(1, -1)
    if cached is None:
        return lambda: model.forward(ids, positions, UncachedAttention(spec), rows)
    cache = ContiguousKVCache(spec, 1, start + num_new, device=model.device)
    cache.length = start  # as if so many had been written
    return lambda: model.forward(ids, positions, CachedAttention(spec, cache), rows)


# %%
kinds = {
    "prefill of 96": (96, 0, "last", 1),
    "chunk of 16 behind 80": (16, 80, "last", 1),
    "cached step at 96": (1, 95, "last", 1),
    "uncached step at 96": (96, None, None, 96),
}
rows = []
for name, (q, cached, which, num_rows) in kinds.items():
    counted = count_flops(forward(q, cached, which))
    k = q + (cached or 0)
    exact = costs.forward_flops(spec, q, k, num_rows)
    masked = costs.masked_forward_flops(spec, q, k, num_rows)
    assert counted == masked
    coarse = 2 * 134_500_000 * q + costs.attention_flops(spec, costs.causal_pairs(q, k))
    rows.append(
        {
            "forward": name,
            "coarse": units.flops(coarse),
            "exact": f"{exact:,}",
            "with masked pairs": f"{masked:,}",
            "counted": f"{counted:,}",
        }
    )
table(rows, "FLOPs of one forward of SmolLM2-135M, three accountings and the counter")

# %% [markdown]
# The last two columns agree in every digit. Three things to read off:
#
# - *Exact* and *counted* differ where several queries share a call: the counter charges the whole
#   rectangle of pairs, a causal kernel skips the half above the diagonal. For one query they are
#   equal, for a decode step masks nothing.
# - A prefill that keeps one row of logits is cheaper than the coarse "2P a token": the output head,
#   a large part of this small model, runs once. The uncached step pays for it at every position.
# - *Coarse* is good for planning and bad for finding a bug.

# %% [markdown]
# ### Accounting mistakes, switched on and caught
#
# Each of these stood in a public tool or text. All give plausible numbers. Against the counter each
# of them fails.

# %%
from kvlab.notebook.cost_mistakes import MISTAKES, right_answers

rows = []
for mistake in MISTAKES:
    right, wrong = right_answers(spec)[mistake.quantity], mistake.compute(spec)
    assert right != wrong
    rows.append(
        {
            "mistake": mistake.name,
            "quantity": mistake.quantity,
            "wrong by": f"{wrong / right:.2f} x",
            "caught by": mistake.caught_by,
        }
    )
table(rows, "Accounting mistakes on SmolLM2-135M, one cached step at 96 and a prefill of 96")

# %% [markdown]
# ### Bytes
#
# The same for bytes. What a step streams is what the model holds as matrices, plus what the cache
# holds. The input embedding is not streamed: one row of it is picked.

# %%
matrices = [model.lm_head] + [
    weight
    for layer in model.layers
    for weight in (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj)
]
held = sum(weight.nbytes for weight in matrices)
cache = ContiguousKVCache(spec, 1, 96)
streamed = costs.streamed_params(spec)
assert held == costs.weight_bytes(streamed, 4)
assert held + cache.nbytes == costs.cached_step_bytes(spec, streamed, 96, 4)
print(f"{held:,} bytes of matrices + {cache.nbytes:,} of cache: as computed")

# %% [markdown]
# ## Your machine
#
# Two measurements of a second each give your own roofs: read a buffer that no cache can hold, and
# multiply two square matrices.

# %% tags=["nbval-ignore-output"]
# A clock: yours will differ.
from kvlab.notebook.measure import in_turns, measured_hardware, medians

here = measured_hardware(device=model.device)
ridge = costs.ridge_intensity(
    here.peak_flops_per_second["fp32"], here.bandwidth_bytes_per_second
)
say(
    f"**{here.name}** reads {units.decimal_bytes(here.bandwidth_bytes_per_second)}/s and does "
    f"{units.flops(here.peak_flops_per_second['fp32'])}/s in fp32. Its ridge is at {ridge:.1f} "
    "FLOP per byte."
)


# %% [markdown]
# Now predict. The checkpoint has fp32 weights here, so a cached step at a short context reads four
# bytes a weight and little else. An uncached step does the arithmetic for all tokens.

# %%
def predicted(num_new, context, num_rows, batch=1):
    flops = batch * costs.forward_flops(spec, num_new, context, num_rows)
    moved = costs.batch_step_bytes(spec, streamed, batch, context, 4)
    return costs.roofline_seconds(
        flops, moved, here.peak_flops_per_second["fp32"], here.bandwidth_bytes_per_second
    )


def batched(batch, context=96):
    """One cached step of `batch` sequences."""
    cache = ContiguousKVCache(spec, batch, context, device=model.device)
    cache.length = context - 1  # as if so many had been written
    attend = CachedAttention(spec, cache)
    ids = torch.full((batch, 1), 11, device=model.device)
    return lambda: model.forward(ids, torch.full_like(ids, context - 1), attend, "last")


calls = {"uncached": forward(96, None, None)} | {f"batch {b}": batched(b) for b in (1, 4, 16)}
measured = medians(in_turns(calls, rounds=5))

# %% tags=["nbval-ignore-output"]
# A clock: yours will differ.
guesses = {"uncached": predicted(96, 96, 96)}
guesses |= {f"batch {b}": predicted(1, 96, 1, b) for b in (1, 4, 16)}
rows = []
for name, seconds in measured.items():
    tokens = int(name.split()[-1]) if name != "uncached" else 1
    rows.append(
        {
            "step": name,
            "predicted tokens/s": f"{tokens / guesses[name]:,.0f}",
            "measured tokens/s": f"{tokens / seconds:,.0f}",
            "measured / predicted": f"{guesses[name] / seconds:.0%}",
        }
    )
table(rows, "One step at context 96 on this machine, fp32: roofline and clock")

# %% [markdown]
# A measurement that exceeds the prediction is no miracle: the roofs were measured too, with other
# shapes, on a machine that may have been busier. One that falls short has a reason. For one sequence
# the next part looks for it. A batch has a second one: its products read each weight once, as planned,
# but a library may take several times as long for a few rows as for one.

# %% [markdown]
# On a GPU the same holds, with other numbers: `make gpu` times the engine with the kernel of chapter 6
# and with torch, against the roofs that it measures on the card.

# %% tags=["hide-input"]
from kvlab.notebook.bench_record import gpu_records, show_engine_on_gpus

show_engine_on_gpus(spec, gpu_records())

# %% [markdown]
# ### The gap has a name
#
# A step is more than its products. Each operator call costs some microseconds in which Python and
# torch decide what to run. `make bench` measures this in turns, round after round, beside
# transformers and llama.cpp. Here is the record that stands in `data/measurements`. It is of another
# run than the table above, on a machine that it names, and first of one thread.

# %% tags=["hide-input"]
from kvlab.notebook import bench_record
from kvlab.notebook.bench_record import recorded

record, case = recorded("cpu"), "fp32, 1 thread"
bench_record.say_machine(record)

# %% tags=["hide-input"]
bench_record.show_overhead(record, case)

# %% tags=["hide-input"]
gap = record["cases"][f"overhead, {case}"]
loops = [name for name in gap["operators"] if "alone" not in name]
calls_of = [gap["operators"][name] for name in loops]
ratios = gap[f"ratio_{bench_record.clock_of(record)}"]
alone, floor = ratios["matrix-vector products alone"], ratios["reading the weights' bytes"]
say(
    f"Reading the weights' bytes is the floor: this loop reaches **{floor:.0%}** of it. The floor is a "
    f"measurement too, a sum as torch runs it. A row a little below it read the same bytes faster than "
    f"that sum did. The products alone, which do nothing but read weights and multiply, take {alone:.0%} of the step; where they "
    f"take longer than the floor, torch's library is the limit. The other {1 - alone:.0%} is "
    f"the loop's *overhead*: everything between the products: norms, rotation, attention, the cache write, and the calls "
    f"themselves, {calls_of[0]:,} of them here and {calls_of[1]:,} in transformers."
)

# %% tags=["hide-input"]
two = record["cases"]["overhead, fp32, 2 threads"][f"ratio_{bench_record.clock_of(record)}"]
alone, floor = two["matrix-vector products alone"], two["reading the weights' bytes"]
say(
    f"With two threads the floor is {floor:.0%} of the step and the products alone {alone:.0%}. What lies "
    "between these two is the library: two threads do not bring its products to the floor. The rest is "
    "overhead."
)

# %% tags=["hide-input"]
bench_record.say_products(record)

# %%
bench_record.show_means(record, case)

# %% [markdown]
# Each row changes one thing and leaves the rest. None of them needs a compiler, and a reader finds
# each in `kvlab/fast.py`, `kvlab/cache.py` or `kvlab/attention.py` in a line or two.
#
# ### The same products twice
#
# Chapter 1's decoder multiplies as one writes it on paper: `kvlab/model.py`, class `Products`. What
# `load()` gives you on a CPU has `FastProducts` instead, from `kvlab/fast.py`, chosen once when the
# decoder is made. One token is a vector there, so a product is a matrix-vector product. A matrix lies in memory
# along its longer side, because long unbroken runs read fastest. And the norm's one factor and the
# residual ride along in the product's call. By hand, for the first projection of layer 0:

# %%
from kvlab.model import rms_norm

layer = model.layers[0]
x = model.embed_tokens[11]  # one token's hidden state, [d]
on_paper = torch.nn.functional.linear(rms_norm(x, layer.input_norm, layer.eps), layer.qkv_proj)

factor = float((x @ x / len(x) + layer.eps) ** -0.5)  # 1 / rms(x): one number for the row
in_one_call = torch.addmv(
    on_paper.new_zeros(len(on_paper)), layer.qkv_proj, x * layer.input_norm, beta=0, alpha=factor
)
print("the same row of Q, K and V:", torch.allclose(on_paper, in_one_call, atol=1e-4))

# %%
from kvlab.checkpoint import read_weights
from kvlab.generate import cached_generate
from kvlab.fast import FastProducts
from kvlab.model import Decoder, Products

weights = read_weights(checkpoint.folder)
plain, fast = (Decoder(spec, weights, products) for products in (Products(), FastProducts()))
ids = checkpoint.encode("The capital of France is")
same = cached_generate(plain, ids, 12) == cached_generate(fast, ids, 12)
print(type(plain.products).__name__, "and", type(fast.products).__name__, "write the same:", same)

# %% [markdown]
# Against the context both grow, by little beside the weights:

# %% tags=["hide-input"]
bench_record.show_context(record)

# %% tags=["hide-input"]
points = record["cases"][f"context, {case}"]["points"]
least, most = min(points, key=int), max(points, key=int)
medians_at = {s: points[s][bench_record.clock_of(record)] for s in (least, most)}
ours, theirs = (
    units.seconds(medians_at[most][loop]["median_seconds"] - at["median_seconds"])
    for loop, at in medians_at[least].items()
)
say(
    f"From s = {int(least):,} to {int(most):,} kvlab's step, which reads its cache, grows by {ours}; "
    f"that of transformers, whose cache is copied at every step, by {theirs}."
)

# %% [markdown]
# The [bench page](../book/bench.md) has all recorded cases, llama.cpp among them, and says how to
# repeat them on your machine with one command.

# %% [markdown]
# ## A batch shares the weights, and nothing else
#
# The weights come past once for the whole batch. K and V belong to one sequence each. So the first
# sequences of a batch are almost free, and at some number of resident tokens the KV is the larger
# part. Guess where, before you look.

# %%
from kvlab.notebook.widgets.practice import Predict

show(
    Predict(
        "Llama-3-8B, weights and KV in bf16: how many resident tokens, over the whole batch, make a "
        "step read as much KV as weights?",
        costs.kv_weight_crossover_tokens(llama, P),
        "tokens",
        "Weights in bytes / bytes per token.",
    )
)

# %% tags=["hide-input"]
batches = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


def rate(batch, context):
    flops = costs.batch_step_flops(llama, P, batch, context)
    moved = costs.batch_step_bytes(llama, P, batch, context)
    return batch / costs.roofline_seconds(flops, moved, peak, bandwidth)


figure(
    {f"context {c:,}": (batches, [rate(b, c) for b in batches]) for c in (512, 2304, 8192)},
    x="sequences in the batch",
    y="tokens per second, at most",
    title=f"Llama-3-8B, bf16, on {card.name}: batching under the roofs",
    alt="Tokens per second over batch size for three contexts: each rises in proportion at first "
    "and then flattens, the longer the context the sooner",
    log_x=True,
    log_y=True,
)

# %% tags=["hide-input"]
limit = costs.intensity_limit(llama, P, 2304)
say(
    f"Even a batch without end does not reach the arithmetic roof at s = 2,304: it would have "
    f"{limit:.0f} FLOP per byte, and the ridge is at "
    f"{costs.ridge_intensity(peak, bandwidth):.0f}. A single stream never gets faster by "
    "batching; its own K and V and everyone's weights still have to pass."
)

# %% [markdown]
# ## What fits
#
# Batching needs room. An engine takes a share of the card (0.9 here; vLLM's default was that for years
# and is a little more by now), subtracts the weights and the room that one forward needs, and cuts the
# rest into blocks. The table leaves the forward's room out, so a real pool is smaller. One block is
# kept back: the null block, for table entries with nothing to read.

# %%
from kvlab import costs

rows = []
for name in ["h100-sxm", "h200-sxm", "a100-40gb", "l4", "rtx-4090"]:
    device = hardware(name)
    pool = costs.pool_bytes(device.driver_memory_bytes, 0.9, costs.weight_bytes(P))
    blocks = costs.num_blocks(pool, costs.kv_bytes_per_token(llama), 16) - 1
    tokens = costs.pool_tokens(blocks, 16)
    rows.append(
        {
            "card": device.name,
            "driver reports": units.both_bytes(device.driver_memory_bytes),
            "pool": units.binary_bytes(pool),
            "blocks of 16": f"{blocks:,}",
            "tokens": f"{tokens:,}",
            "requests of 8,192": f"{costs.concurrency(tokens, 8192):,.2f}",
        }
    )
table(rows, "Llama-3-8B in bf16 at a utilisation of 0.9, one block kept back")

# %% tags=["hide-input"]
asked = costs.weight_bytes(P) + 64 * costs.kv_bytes(llama, 8192)
say(
    f"Sixty-four requests of 8,192 tokens and the weights, all in bf16 and P coarse, are "
    f"{units.both_bytes(asked)}. Does that fit on an H100? "
    + " ".join(
        f"Against {name}, {units.both_bytes(room)}: {'yes' if asked <= room else 'no'}."
        for name, room in {
            "its name": 80_000_000_000,
            "what the driver reports": card.driver_memory_bytes,
            "0.9 of that": int(0.9 * card.driver_memory_bytes),
        }.items()
    )
    + " The last answer is the one that counts. A sentence that flips with the unit needs its unit."
)

# %% [markdown]
# The planner of chapter 3 does this sum for any model, card and format.
#
# ### Read an engine's log
#
# vLLM prints three figures when it starts. Can they be believed? The lines below have its format; their
# figures are derived for the H100 of the table, with nothing taken off for a forward. So they must
# agree. What counts is which check would notice if they did not. (The [audit page](../book/audit.md)
# does this with the log of your own engine.)

# %%
from kvlab.sheet import audit
from kvlab.specs import DATA_DIR

log = (DATA_DIR / "engine_logs" / "vllm-v1-two-lines.log").read_text()
print(log)
rows = [
    {
        "check": c["name"],
        "predicted": f"{c['predicted']:,}",
        "log": f"{c['reported']:,}",
        "could have failed": "yes" if c["independent"] else "no",
    }
    for c in audit(llama, log)["checks"]
]
table(rows, "The start-up log, recomputed")

# %% [markdown]
# Only the first check tests anything. Tokens against memory contains the model's shape: had the
# reader of the config been wrong about heads or head size, it would not come out. Concurrency
# against tokens is one division, right for any model. And for a hybrid model even that fails: with
# windows or a fixed state per request, bytes are not proportional to tokens, so the tokens that the
# log prints are a way of speaking.

# %% [markdown]
# ## What each later technique attacks
#
# Now the question that this book was for. Take the step apart: bytes of weights, bytes of KV, and
# time that is neither. Whoever promises a gain attacks one of them, and can gain no more than its
# share. Llama-3-8B at s = 2,304 on the H100, for one sequence and for a batch of 64:

# %%
from dataclasses import replace

from kvlab.sheet import storage_format
from kvlab.specs import LayerSpec


def step(batch, spec=llama, weight_width=2, kv_width=2, extra=0.0):
    """Seconds of one step by its bytes, plus time that no bytes explain."""
    moved = costs.weight_bytes(P, weight_width) + batch * costs.kv_bytes(spec, s, kv_width)
    return costs.memory_seconds(float(moved), bandwidth) + extra


def with_layers(*layers):
    return replace(llama, layers=layers * (llama.num_layers // len(layers)))


full, window = LayerSpec("full", 8, 128, 128), LayerSpec("sliding", 8, 128, 128, window=1024)
latent = LayerSpec("latent", 1, 576, 0)  # the shape that DeepSeek-V3 caches
launches = 12 * llama.num_layers  # an assumption: kernels started by one step
graph = costs.step_seconds_with_overhead(launches, 5e-6, 0.0)
drafts = costs.tokens_per_verified_step(0.7, 4)

# %%
changes = {
    "KV in 8 bits": ("KV bytes", dict(kv_width=storage_format("fp8").bytes_per_element)),
    "KV in 4 bits, scales included": (
        "KV bytes",
        dict(kv_width=storage_format("int4").bytes_per_element),
    ),
    "MLA in place of GQA": ("KV bytes", dict(spec=with_layers(latent))),
    "3 of 4 layers with a window of 1,024": (
        "KV bytes",
        dict(spec=with_layers(window, window, window, full)),
    ),
    "weights in 8 bits": ("weight bytes", dict(weight_width=1)),
}
rows = [
    {
        "technique": name,
        "attacks": what,
        **{f"gain, batch {b}": f"{step(b) / step(b, **change):.2f} x" for b in (1, 64)},
    }
    for name, (what, change) in changes.items()
]

# %%
rows += [
    {
        "technique": "batch of 64 in place of 1",
        "attacks": "weight bytes per token",
        "gain, batch 1": f"{64 * step(1) / step(64):.1f} x",
        "gain, batch 64": "1.00 x",
    },
    {
        "technique": "4 drafts, 0.7 accepted each",
        "attacks": "steps per token",
        **{f"gain, batch {b}": f"{drafts:.2f} x" for b in (1, 64)},
    },
    {
        "technique": "a graph: no time between calls",
        "attacks": "time without bytes",
        **{f"gain, batch {b}": f"{step(b, extra=graph) / step(b):.2f} x" for b in (1, 64)},
    },
]
table(
    rows,
    "What the bytes allow each technique to gain, at most",
    "Graph: twelve kernels a layer at 5 µs each that nothing hides, an assumption you can change above. "
    "Drafts: the drafter itself is taken as free.",
)

# %% [markdown]
# How a row comes about: a draft counts only if all before it were right, and one token is the model's
# own, so with a share $a$ accepted a step gives $1 + a + a^2 + \dots$ tokens. A GPU kept busy takes its
# next launches while it works, and then a graph gains little.
#
# Two readings. For one sequence everything about KV is almost without effect at this context: the
# weights are the bytes. In the batch KV is the larger part, and the same techniques begin to count.
# Paging does not appear at all, for it moves no fewer bytes. It lets more sequences in, which is the
# row called batch.

# %% [markdown]
# ## Exercises
#
# `check` says what is wrong with an answer, `hint("8.1")` gives a push. As a page: the [exercises
# page](../book/progress.md) checks your answers in the browser.
#
# **8.1** Llama-3-8B in bf16 decodes one sequence on an L4. At context 4,096, how many tokens a second
# are possible at most? (The card's row stands in the table of roofs; P as above.)

# %%
from kvlab.notebook.exercises import check, hint, status

answer = None  # your answer here, a number
check("8.1", answer)

# %% [markdown]
# <details><summary>Solution of 8.1</summary>
#
# ```python
# answer = 300e9 / (2 * 8.03e9 + 4096 * 131_072)
# ```
#
# Bandwidth over bytes, whatever the arithmetic units could do.
#
# </details>
#
# **8.2** The same model, weights and KV in bf16. From how many resident tokens on, over the whole
# batch, does a step read more KV than weights?

# %%
answer = None  # your answer here, a number
check("8.2", answer)


# %% [markdown]
# <details><summary>Solution of 8.2</summary>
#
# `2 * 8.03e9 / 131_072`. Both sides are bytes; with the same number of bytes an element it cancels
# out.
#
# </details>
#
# **8.3** The roofline as a function: the least time of a step, from its FLOPs, its bytes and the two
# roofs.

# %%
def step_seconds_of_mine(flops, bytes_moved, peak, bandwidth):
    """The least time of a step, in seconds."""


check("8.3", step_seconds_of_mine)

# %% [markdown]
# <details><summary>Solution of 8.3</summary>
#
# ```python
# def step_seconds_of_mine(flops, bytes_moved, peak, bandwidth):
#     return max(flops / peak, bytes_moved / bandwidth)
# ```
#
# </details>
#
# **8.4** An H100 holds the model. An engine may use 0.9 of what the driver reports (`card` knows it).
# How many sequences of 8,192 tokens fit at the same time, KV in bf16?

# %%
answer = None  # your answer here, a whole number
check("8.4", answer)

# %% [markdown]
# <details><summary>Solution of 8.4</summary>
#
# ```python
# pool = 0.9 * card.driver_memory_bytes - 2 * 8.03e9
# answer = pool // (8192 * 131_072)
# ```
#
# </details>

# %%
status(8)

# %% [markdown]
# ## In the engines
#
# vLLM profiles one forward at start-up, subtracts what it used from its share of the card, divides
# the rest by the bytes of a block, and prints tokens and concurrency (`get_kv_cache_configs` in
# `vllm/v1/core/kv_cache_utils.py` at `a556f3f`; the bytes of a cell are head size times dtype size
# for K and for V, the page is heads times block size times cell). SGLang sizes its pool by tokens and
# prints K and V apart (`MHATokenToKVPool` in `python/sglang/srt/mem_cache/memory_pool.py` at
# `000ccdb`). Both capture graphs of decode steps for a list of batch sizes: that removes the time between
# calls, and nothing else.

# %% [markdown]
# ## What it cost, what comes next

# %% tags=["hide-input"]
say(
    "**What was built**: a price for a decode step: FLOPs and bytes to the unit, the roof that binds, the gap "
    "that remains and what it is made of.",
    f"**What it cost**: two measurements of a second each, and a counter: {len(kinds)} kinds of forward agree "
    f"with it in every digit, and {len(MISTAKES)} wrong formulas do not.",
    f"**What it made possible**: to say of a technique, before building it, which bytes it attacks and what "
    f"it can gain: KV in 8 bits makes one stream {step(1) / step(1, kv_width=1):.2f} times as fast, "
    f"a batch of 64 {step(64) / step(64, kv_width=1):.2f} times.",
)

# %% [markdown]
# Eight layers lie behind you, from one forward per token to an engine with blocks. All rest on one
# fact: K and V of a token, once computed, are final.
#
# Take your own model's config.json and your own card, and predict. Then measure.
#
# **References.** Williams, Waterman and Patterson 2009 for the roofline; Pope et al. 2022 for the
# accounting of inference; Kwon et al. 2023 for paging; Leviathan et al. 2023 for speculation. See
# the [references page](../book/references.md).
