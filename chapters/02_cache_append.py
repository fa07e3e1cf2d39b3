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
# # 2. Cache append
#
# [**Open in Colab**](https://colab.research.google.com/github/OWNER/kvlab/blob/main/chapters/02_cache_append.ipynb)
#
# **What can be kept between two decode steps, and what does keeping it buy?**
#
# You build a KV cache: memory that is allocated once, written once a token, and read at every
# step. You prove that it changes nothing in the text, count what it saves, and find out exactly
# when keeping is allowed. The answer to that last question is not "when the mask is causal".
#
# You need [chapter 1](01_naive_decode.ipynb): the naive loop, and the fact that K and V of old
# tokens come out the same at every step.

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
# ## Two columns
#
# On the left the naive loop, on the right a loop with a cache. A square is a token that goes through
# the model: a decode step at context $s$ adds $s$ squares on the left and one on the right. The
# strong squares are those of this step. Below the line hangs what is kept: one K and one V a token,
# on the right alone. Press *Play* and watch $t$ run, then *Running example*.

# %%
from kvlab.configs import preset
from kvlab.notebook.widgets import show
from kvlab.notebook.widgets.costs import CostTable

llama = preset("llama-3-8b")
show(CostTable())

# %% [markdown]
# The rest of this chapter builds the right column. (On the live page, the row *FLOP
# per byte* is for chapter 8.)

# %%
import torch

from kvlab import costs
from kvlab.checkpoint import load
from kvlab.notebook.display import figure, say, table
from kvlab.sheet import units

checkpoint = load(dtype=torch.float32)  # on the GPU if there is one; exact enough to compare
model, spec = checkpoint.model, checkpoint.spec
print(checkpoint.source)
prompt_ids = checkpoint.encode("The capital of France is Paris. The capital of Italy is")

# %% tags=["nbval-ignore-output"]
# Depends on the machine: yours may differ.
from kvlab.notebook.measure import runtime

print(runtime(model))

# %% [markdown]
# ## Keep K and V, feed one token
#
# A decode step needs three things in each layer: the query of the new token, and the keys and
# values of all tokens. The keys and values of the old ones are final, so we keep them. The query
# is used in this step and by no later one, so nobody keeps it.
#
# First the obvious way: two lists that grow. There are more keys than queries now. The queries are
# always the last of the keys, so `attention` aligns its mask at the end: the one query of a decode step
# sees every key.

# %%
from kvlab.attention import attention

kept = {}


def remember(layer, query, key, value):
    """key and value [1, t, h_kv, d_h] of the new tokens only."""
    if layer in kept:
        key = torch.cat((kept[layer][0], key), dim=1)
        value = torch.cat((kept[layer][1], value), dim=1)
    kept[layer] = key, value
    return attention(query, key.transpose(1, 2), value.transpose(1, 2))


# %%
def decode(prompt_ids, num_outputs, attend):
    """Prefill with the whole prompt, then feed one token a step."""
    fed, start, outputs = list(prompt_ids), 0, []
    while len(outputs) < num_outputs:
        tokens = torch.tensor([fed], device=model.device)
        positions = torch.arange(start, start + len(fed), device=model.device).view(1, -1)
        logits = model.forward(tokens, positions, attend)
        outputs.append(int(logits[0, -1].argmax()))
        start += len(fed)
        fed = outputs[-1:]
    return outputs


by_hand = decode(prompt_ids, 12, remember)
print(checkpoint.decode(by_hand))

# %%
from kvlab.generate import cached_generate, naive_generate

assert by_hand == naive_generate(model, prompt_ids, 12)
print("the same text as the naive loop, one token fed a step")


# %% [markdown]
# Look at the positions. After a prompt of $p$ tokens the first decoded token stands at position
# $p$, the next at $p + 1$. It is easy to get this wrong by one, nothing complains, and chapter 4
# shows what comes of it.

# %% [markdown]
# ## Allocate once
#
# Growing by `torch.cat` makes a new, longer tensor at every step and copies the old one into it. A
# cache that knows its largest size allocates it once and writes the new rows into place. This is
# the whole class, for one layer:

# %%
class LayerCache:
    """K and V of one layer, [h_kv, max_len, d_h] each."""

    def __init__(self, num_kv_heads, max_len, head_dim):
        self.key = torch.zeros(num_kv_heads, max_len, head_dim, device=model.device)
        self.value = torch.zeros_like(self.key)
        self.length = 0

    def write(self, key, value):
        """key, value [t, h_kv, d_h]: rows behind the ones that are there."""
        stop = self.length + key.shape[0]
        self.key[:, self.length : stop] = key.transpose(0, 1)
        self.value[:, self.length : stop] = value.transpose(0, 1)
        self.length = stop


# %%
max_len = len(prompt_ids) + 11
layers = [LayerCache(spec.num_kv_heads, max_len, spec.head_dim) for _ in range(spec.num_layers)]


def append(layer, query, key, value):
    layers[layer].write(key[0], value[0])
    length = layers[layer].length
    return attention(query, layers[layer].key[None, :, :length], layers[layer].value[None, :, :length])


# %%
assert decode(prompt_ids, 12, append) == by_hand
print("the same text, nothing moved")

# %% [markdown]
# `write` takes K and V, and nothing else. Its rows are made once, by the forward that fed the
# token, and only read from then on. kvlab's `ContiguousKVCache` is this class for all layers and a
# batch, with named errors for what does not fit.

# %%
from kvlab.attention import CachedAttention
from kvlab.cache import ConcatenatedKVCache, ContiguousKVCache
from kvlab.errors import CacheError

cache = ContiguousKVCache(spec, 1, max_len=len(prompt_ids) + 11, device=model.device)
assert cached_generate(model, prompt_ids, 12, cache=cache) == by_hand
print("layer 0 key:", list(cache.keys[0].shape), "= [batch, h_kv, max_len, d_h]")
same_rows = torch.equal(cache.keys[0][0, :, : cache.length], layers[0].key[:, : cache.length])
print("the same rows as ours, to the bit:", same_rows)

# %%
try:
    short = ContiguousKVCache(spec, 1, len(prompt_ids), device=model.device)
    cached_generate(model, prompt_ids, 3, cache=short)
except CacheError as error:
    print("CacheFull:", error)

# %% [markdown]
# ## What growing costs
#
# The two caches hold the same rows. `ConcatenatedKVCache` counts the bytes that each `torch.cat`
# moved to make room. The closed form is the sum of the cache's size before every step.

# %%
p, n = len(prompt_ids), 8
growing = ConcatenatedKVCache(spec)
cached_generate(model, prompt_ids, n + 1, cache=growing)
predicted = costs.kv_bytes_copied_by_concatenation(spec, p, n, bytes_per_element=4)
assert growing.bytes_copied == predicted
print(f"{n} steps copied {growing.bytes_copied:,} bytes; the closed form says {predicted:,}")
print(f"all they added was {growing.nbytes - costs.kv_bytes(spec, p, 4):,} bytes")

# %% tags=["hide-input"]
copied = costs.kv_bytes_copied_by_concatenation(llama, 2048, 512)
final = costs.kv_bytes(llama, 2560)
say(
    f"On the running example, a cache grown this way moves {units.both_bytes(copied)} to end up "
    f"with {units.both_bytes(final)}: on average a byte of it is carried {copied / final:.0f} times. "
    "Libraries do work like this (transformers' default cache does), and at short contexts it hardly shows."
)

# %% [markdown]
# ## Is it the same computation?
#
# In exact arithmetic, yes. In floating point the two loops add the same numbers in another order,
# because a matrix product over many rows is blocked differently from one over a single row. So
# logits agree to rounding, not to the bit. We check every step, on the real checkpoint, in float32.

# %%
naive_steps, cached_steps = [], []
naive_generate(model, prompt_ids, 10, on_step=naive_steps.append)
cached_generate(model, prompt_ids, 10, on_step=cached_steps.append)
print(len(naive_steps), "steps of each loop")

# %%
TOLERANCE = 5e-4  # on logits near 45
pairs = list(zip(naive_steps, cached_steps, strict=True))
worst = max(float((a.logits - b.logits).abs().max()) for a, b in pairs)
print("every step within", TOLERANCE, ":", worst < TOLERANCE)

# %% [markdown]
# Ids are a harsher test than logits: they change when two candidates are closer to each other
# than the rounding. With float64 the rounding is so small that equal ids are a fair demand. We make
# it on a tiny random model, where near-ties are common.

# %%
from dataclasses import replace

from kvlab.model import Decoder

tiny = replace(
    spec, name="tiny", num_layers=2, layers=spec.layers[:2], vocab_size=64, intermediate_size=96
)

# %%
equal = 0
for seed in range(3):
    random_model = Decoder.random(tiny, seed=seed, dtype=torch.float64)
    naive_ids = naive_generate(random_model, [1, 2, 3], 32)
    equal += naive_ids == cached_generate(random_model, [1, 2, 3], 32)
print("float64, random models with equal ids:", equal, "of 3")


# %% [markdown]
# In bfloat16 a number keeps eight significant bits, and ties are common. Where the two best
# candidates are that close, the two loops can part ways. That is not a bug in the cache. The test for
# it: at the first step where the ids differ, the two best candidates must be about as close as the
# rounding. More random models, the same loops:

# %%
def first_parting(seed, num_outputs=32):
    """The step of the naive loop at which the ids first differ in bfloat16, or None."""
    random_model = Decoder.random(tiny, seed=seed, dtype=torch.bfloat16)
    steps, others = [], []
    naive_generate(random_model, [1, 2, 3], num_outputs, on_step=steps.append)
    cached_generate(random_model, [1, 2, 3], num_outputs, on_step=others.append)
    return next((a for a, b in zip(steps, others) if a.token_id != b.token_id), None)


partings = [step for step in map(first_parting, range(24)) if step is not None]

# %%
ROUNDING = 2**-8  # of a number that keeps eight significant bits


def near_tie(step):
    """Whether the two best logits are within a few roundings of each other."""
    best, second = step.logits.float().topk(2).values.tolist()
    return best - second <= 8 * ROUNDING * step.logits.float().abs().max()


assert partings and all(map(near_tie, partings))

# %% tags=["nbval-ignore-output"]
# Depends on the machine: yours may differ.
# Rounding: another device adds in another order.
for step in partings:
    best, second = step.logits.float().topk(2).values.tolist()
    print(f"apart at output {step.t}: the two best logits are {best:.4f} and {second:.4f}")

# %% [markdown]
# So never test a cache by comparing two texts in half precision. Compare logits within a tolerance
# at every step, and ids up to the first near-tie.

# %% [markdown]
# ## When is keeping allowed?
#
# The usual answer is "because attention is causal". The exact one: **because K and V come out the
# same at the next step**. Causality makes that so, but it is not the only way. We give our
# checkpoint three masks and ask each time: is K of the old tokens the same after one more token?

# %%
import torch.nn.functional as F


def keys_of(ids, mask_of):
    """K of every layer, each [s, h_kv, d_h]; mask_of(s) is True where a query may look."""
    kept = []

    def attend(layer, query, key, value):
        kept.append(key[0].clone())
        group = spec.num_heads // spec.num_kv_heads
        # a copy of each KV head for every query head that reads it (chapter 3)
        k = key.transpose(1, 2).repeat_interleave(group, 1)
        v = value.transpose(1, 2).repeat_interleave(group, 1)
        out = F.scaled_dot_product_attention(query.transpose(1, 2), k, v, mask_of(len(ids)))
        return out.transpose(1, 2)

    tokens = torch.tensor([ids], device=model.device)
    model.forward(tokens, torch.arange(len(ids), device=model.device).view(1, -1), attend)
    return kept


# %%
def unchanged(mask_of):
    """Per layer: are the K of the first tokens the same after one more token?"""
    ids = prompt_ids + by_hand
    shorter, longer = keys_of(ids[:-1], mask_of), keys_of(ids, mask_of)
    old = len(ids) - 1
    return [
        torch.allclose(a[:old], b[:old], atol=1e-3) for a, b in zip(shorter, longer, strict=True)
    ]


# %%
PREFIX = 6
everything = lambda s: torch.ones(s, s, dtype=torch.bool, device=model.device)
causal = lambda s: everything(s).tril()


def fixed_prefix(s):
    """The first tokens see each other in both directions; nothing later is seen from there."""
    mask = causal(s)
    mask[:PREFIX, :PREFIX] = True
    return mask


# %%
import pandas as pd

kinds = {
    "causal": unchanged(causal),
    "bidirectional, growing": unchanged(everything),
    "bidirectional prefix, then causal": unchanged(fixed_prefix),
}
table(
    pd.DataFrame(
        {
            "layer 0 K unchanged": {k: v[0] for k, v in kinds.items()},
            "deeper layers unchanged": {k: f"{sum(v[1:])} of {len(v) - 1}" for k, v in kinds.items()},
        }
    ),
    "K of old tokens after one more token",
)


# %% [markdown]
# In the growing bidirectional model, layer 0 is unchanged even so: its K and V come straight from
# the embeddings. From layer 1 on they are made of hidden states that have seen the new token.
#
# The third row is not causal, and can be cached all the same: nothing that comes later enters the
# prefix. One more of the kind is *cross-attention*. In a translation model an *encoder* reads the source
# text once, and each decoder layer makes K and V of its output. The source does not grow, so these K
# and V are made once a request, and every step reads them. The encoder's output itself is read only
# when they are made.

# %% [markdown]
# ## When may another request reuse it?
#
# Keeping is one thing; *reusing* what another request kept is another. K depends on more than the
# token ids in front of it. We change one input at a time: nothing, the positions, the weights (an
# *adapter* is a small change to them that one user may have), the first token. Then we look at K and
# V of layer 0, and of all layers.

# %%
def kv_of(ids, first_position=0):
    """(K, V) of every layer for ids at positions first_position, ..."""
    kept = []

    def attend(layer, query, key, value):
        kept.append((key.clone(), value.clone()))
        return attention(query, key.transpose(1, 2), value.transpose(1, 2))

    stop = first_position + len(ids)
    positions = torch.arange(first_position, stop, device=model.device).view(1, -1)
    model.forward(torch.tensor([ids], device=model.device), positions, attend)
    return kept


# %%
weights = model.layers[0].qkv_proj
as_loaded = weights.clone()
weights.mul_(1.01)  # a small change to one matrix of layer 0
with_adapter = kv_of(prompt_ids)
weights.copy_(as_loaded)

base = kv_of(prompt_ids)
changes = {
    "nothing": kv_of(prompt_ids),
    "every position shifted by 7": kv_of(prompt_ids, first_position=7),
    "an adapter on layer 0": with_adapter,
    "another first token": kv_of([prompt_ids[1], *prompt_ids[1:]]),
}


# %%
def agrees(pair, index):
    return torch.allclose(pair[0][index][:, 1:], pair[1][index][:, 1:], atol=1e-3)


rows = {}
for name, other in changes.items():
    pairs = list(zip(base, other, strict=True))
    rows[name] = {
        "K, layer 0": agrees(pairs[0], 0),
        "V, layer 0": agrees(pairs[0], 1),
        "K, all layers": all(agrees(pair, 0) for pair in pairs),
        "V, all layers": all(agrees(pair, 1) for pair in pairs),
    }
table(pd.DataFrame(rows).T, "Do K and V of the later tokens stay the same?")

# %% [markdown]
# Read the second row. Shift every position alike, and no output changes at all (chapter 4 shows
# why), yet cached K changes, while V is the same in every layer. A cache filled at one
# set of positions and read at another is wrong, though both runs are right alone.
#
# Read the last row. Layer 0 makes K and V of each token alone, so another first token leaves them as
# they are. Deeper layers make them of what stood before: the same ids behind another text have other K
# and V.
#
# So reuse needs the same weights and adapters, the same tokens before it, the same positions, the
# same mask, and the same images where there are some. Chapter 5 turns that list into a hash.

# %% [markdown]
# ## The whole run, both columns
#
# The running example once more, as totals: each figure is a closed form, a sum over the contexts
# of all steps. A cached step feeds one token to the weights and looks at $s$ pairs:
#
# $$F_c(s) = 2P + 4 h d_h L s$$

# %%
from kvlab.sheet import cost_report

run = cost_report(llama, 2048, 512)
names = {"projection_flops": "projections", "attention_flops": "attention", "total_flops": "total"}
table(
    pd.DataFrame(
        {
            "without cache": {names[k]: units.flops(v) for k, v in run["uncached"].items()},
            "with cache": {names[k]: units.flops(v) for k, v in run["cached"].items()},
            "ratio": {
                names[k]: f"{run['uncached'][k] / run['cached'][k]:,.1f}" for k in run["cached"]
            },
        }
    ),
    f"{run['decode']} decode forwards after {run['prompt']:,} tokens ({run['accounting']})",
)

# %% tags=["hide-input"]
say(
    f"In the cached run attention is {run['attention_share']:.2%} of the arithmetic; the rest "
    f"multiplies one token by every weight. At the last step the naive loop makes and drops "
    f"{run['rows_discarded_last_step']:,} rows of logits. The price is memory: the cache ends at "
    f"{units.both_bytes(run['kv_bytes_final'])}."
)

# %% [markdown]
# ## The public experiment
#
# The same comparison is one flag in transformers: `generate` with `use_cache` on and off, greedy,
# on the same weights. First your guess, for the prompt above and as many new tokens as the cell
# below asks for.

# %%
from kvlab.notebook.widgets.practice import Predict

NEW = 128
run_contexts = range(p + 1, p + NEW)
streamed, head = costs.streamed_params(spec), costs.embedding_params(spec)


def timed_flops(s):
    """An uncached step as the loops below run it: the output head on one row only."""
    return costs.uncached_step_flops(spec, streamed, s) - costs.projection_flops(head, s - 1)


flops_ratio = sum(map(timed_flops, run_contexts)) / sum(
    costs.cached_step_flops(spec, streamed, s) for s in run_contexts
)
show(
    Predict(
        question=f"{NEW} new tokens on this model: how many times longer without the cache?",
        answer=flops_ratio,
        explanation=(
            "This is the ratio of the FLOPs (exact accounting, one row of logits a step, as generate "
            "makes it). The clock below shows far less: a cached step's time goes into reading the "
            "weights, and it reads as many as an uncached one."
        ),
    )
)

# %%
from transformers import AutoModelForCausalLM, logging

from kvlab.checkpoint import cache_of, layer_key, load_with

logging.set_verbosity_error()
logging.disable_progress_bar()
reference = load_with(AutoModelForCausalLM, checkpoint.folder).to(model.device)
inputs = torch.tensor([prompt_ids], device=model.device)
options = dict(max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None)

theirs = cache_of(reference(inputs, use_cache=True))
print("transformers, layer 0 key:", list(layer_key(theirs).shape), "= [batch, h_kv, seq, d_h]")

# %%
from kvlab.notebook.measure import in_turns


def seconds(function):
    """Seconds of one call; the caller has warmed it up. A GPU is waited for."""
    [[taken]] = in_turns({"call": function}, rounds=1, warm_up=0).values()
    return taken


# %% tags=["nbval-ignore-output"]
# A clock: yours will differ.
with torch.inference_mode():
    reference.generate(inputs, use_cache=True, **{**options, "max_new_tokens": 4})
    with_cache = seconds(lambda: reference.generate(inputs, use_cache=True, **options))
    without = seconds(lambda: reference.generate(inputs, use_cache=False, **options))
print(f"transformers: {without / with_cache:.1f} times as long without its cache")

# %% [markdown]
# Far from the ratio of the FLOPs. A second prediction counts the reading too. It has two constants: the
# rate of reading, from the cached step at the shortest context, and the rate of arithmetic, from the
# uncached step at the longest. At these two points prediction and measurement agree because they were
# set so; the other four are predicted.

# %%
from statistics import median


def step_seconds(s, cached, repeats=2):
    """Median time of one decode step at context s, by kvlab."""
    ids = torch.tensor([[prompt_ids[i % p] for i in range(s)]], device=model.device)
    positions = torch.arange(s, device=model.device).view(1, -1)
    cache = ContiguousKVCache(spec, 1, s, device=model.device)
    attend = CachedAttention(spec, cache)
    if cached:
        model.forward(ids[:, :-1], positions[:, :-1], attend, rows="last")
        cache.advance(s - 1)
        ids, positions = ids[:, -1:], positions[:, -1:]
    times = []
    for _ in range(repeats + 1):
        if not cached:
            cache.reset()
        times.append(seconds(lambda: model.forward(ids, positions, attend, rows="last")))
    return median(times[1:])


contexts = (32, 128, 256)
naive_times = [step_seconds(s, cached=False) for s in contexts]
cached_times = [step_seconds(s, cached=True) for s in contexts]

# %%
bandwidth = costs.cached_step_bytes(spec, streamed, contexts[0], 4) / cached_times[0]
rate = timed_flops(contexts[-1]) / naive_times[-1]


def predicted_seconds(flops, num_bytes):
    """A step takes as long as its bytes or its FLOPs, whichever is longer."""
    return max(costs.memory_seconds(num_bytes, bandwidth), costs.compute_seconds(flops, rate))


# %%
naive_predicted, cached_predicted = [], []
for s in contexts:
    # the weights and K and V, once: charged to both loops alike
    num_bytes = costs.cached_step_bytes(spec, streamed, s, 4)
    naive_predicted.append(predicted_seconds(timed_flops(s), num_bytes))
    cached_predicted.append(predicted_seconds(costs.cached_step_flops(spec, streamed, s), num_bytes))

# %% tags=["nbval-ignore-output"]
# A clock: yours will differ.
milli = lambda times: [1e3 * t for t in times]
figure(
    {
        "uncached, measured": (contexts, milli(naive_times)),
        "uncached, predicted": (contexts, milli(naive_predicted)),
        "cached, measured": (contexts, milli(cached_times)),
        "cached, predicted": (contexts, milli(cached_predicted)),
    },
    x="context s, tokens",
    y="milliseconds",
    title="One decode step on this machine",
    colours={
        "uncached, measured": "waste",
        "uncached, predicted": "waste",
        "cached, measured": "cache",
        "cached, predicted": "cache",
    },
    alt="Time of a decode step against context, with and without a cache, measured and predicted",
)

# %% tags=["nbval-ignore-output", "hide-input"]
# A clock: yours will differ.
say(
    f"At {contexts[-1]} tokens an uncached step takes {naive_times[-1] / cached_times[-1]:.0f} "
    f"times as long as a cached one here; at {contexts[0]}, "
    f"{naive_times[0] / cached_times[0]:.1f} times. The cached line is nearly flat: the weights "
    "are most of what a step reads, and they are the same at every context."
)

# %% tags=["nbval-ignore-output", "hide-input"]
# A clock: yours will differ.
slow, fast = 0.0, 0.0
for s in run_contexts:
    num_bytes = costs.cached_step_bytes(spec, streamed, s, 4)
    slow += predicted_seconds(timed_flops(s), num_bytes)
    fast += predicted_seconds(costs.cached_step_flops(spec, streamed, s), num_bytes)
say(
    f"Over the {NEW} tokens of the experiment the second prediction is {slow / fast:.1f} times, the "
    f"clock of transformers said {without / with_cache:.1f}, and the FLOPs alone {flops_ratio:.0f}."
)

# %% [markdown]
# This is the turn of the book. Without a cache a step is bound by arithmetic. The cache deletes
# nearly all of it, and what is left is bound by *reading*: every weight, once, for a single token.
# Chapter 8 measures that side.

# %% [markdown]
# ## The bugs of this chapter
#
# A cache can be wrong without any error. Three ways: the new query sees the wrong keys, the reader
# goes past the rows that were written, a cache is not emptied between two conversations. Each is
# switched on, then caught. A detector says what it expected.

# %%
from kvlab.faults import FaultDetected, fault

for name in ("top_left_mask", "unwritten_rows_read", "stale_rollback"):
    with fault(name) as entry:
        try:
            entry.detect()
            print(f"{name}: not caught")
        except FaultDetected as found:
            print(f"{name}\n    {entry.symptom}\n    caught: {found}\n")

# %% [markdown]
# ## Exercises
#
# As a page: the [exercises page](../book/progress.md) checks your answers in the browser.
#
# **2.1** How many bytes does one token take in the cache of SmolLM2-135M, in float32?

# %%
from kvlab.notebook.exercises import check, status

answer = None  # your answer here
check("2.1", answer)

# %% [markdown]
# <details><summary>Solution of 2.1</summary>
#
# `costs.kv_bytes_per_token(spec, 4)`, or by hand `30 * 2 * 3 * 64 * 4`.
#
# </details>
#
# **2.2** A cache that grows with `torch.cat` copies what was there at every step. How many bytes, in
# the run that the cell names?

# %%
answer = None  # your answer here
check("2.2", answer)


# %% [markdown]
# <details><summary>Solution of 2.2</summary>
#
# `costs.kv_bytes_copied_by_concatenation(spec, 100, 50, 4)`: the bytes of a token times the sum of
# `100 + t - 1` over the steps.
#
# </details>
#
# **2.3** Write the write itself: the rows of new tokens behind those that are there, in place.

# %%
def write(stored, length, new):
    """stored [h_kv, max_len, d_h] holds `length` tokens; new is [t, h_kv, d_h]."""


check("2.3", write)

# %% [markdown]
# <details><summary>Solution of 2.3</summary>
#
# ```python
# def write(stored, length, new):
#     stored[:, length : length + new.shape[0]] = new.transpose(0, 1)
# ```
#
# `reshape` gives the same shape and the wrong rows. It is the most quiet mistake of this chapter.
#
# </details>
#
# **2.4** Of the things that the cell lists, which does a cache hold with profit?

# %%
answer = None  # your answer here, a set of names
check("2.4", answer)

# %% [markdown]
# <details><summary>Solution of 2.4</summary>
#
# `{"causal decoder", "cross-attention", "fixed prefix"}`. The K and V of a growing bidirectional text
# change with every token. An encoder's output and an old query are final, but no later step reads them.
#
# </details>

# %%
status(2)

# %% [markdown]
# ## In the engines
#
# In vLLM the write is an operation of the attention layer: K and V of the new tokens and a
# `slot_mapping` go in, nothing else (`vllm/v1/attention/backend.py` at commit a556f3f names the
# metadata). In SGLang the pool has `set_kv_buffer(layer, loc, k, v)` and keeps a list of K and a list of V
# buffers, one a layer. Neither writes a query. Encoder-only layers get no cache group in vLLM: one
# forward sees their whole input, and no later step reads their K and V.
#
# Both allocate all memory at start. Neither grows a tensor.

# %% [markdown]
# ## What it cost, what comes next
#
# You have a cache that is written once a token and equal to the naive loop at every step, and you
# know its condition: K and V must come out the same next time.

# %% tags=["hide-input"]
say(
    f"**What it cost**, on the running example: {units.both_bytes(run['kv_bytes_final'])} of memory at "
    f"s = {run['prompt'] + run['decode']:,} in bf16, for one sequence. Every token adds "
    f"{units.binary_bytes(run['kv_bytes_per_token'])}, and every later step reads it.",
    f"**What it made possible**: {units.flops(run['cached']['total_flops'])} instead of "
    f"{units.flops(run['uncached']['total_flops'])} for the {run['decode']} decode steps, "
    f"{run['ratio']:,.0f} times less ({run['accounting']}).",
)

# %% [markdown]
# How much memory? That depends on four constants of the model, and the number of query heads is
# not one of them. [Chapter 3](03_gqa_shapes.ipynb).
#
# **References.** Pope et al. 2022 for the accounting, Shazeer 2019 for what the reading costs. See
# the [references page](../book/references.md).
