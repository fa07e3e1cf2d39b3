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
# # 3. GQA shapes
#
# [**Open in Colab**](https://colab.research.google.com/github/OWNER/kvlab/blob/main/chapters/03_gqa_shapes.ipynb)
#
# **How large is a KV cache, and what decides it?**
#
# You build grouped-query attention: many query heads, few heads of K and V. Then you read the size
# of any model's cache off its `config.json`, as a function of the number of tokens. You prove the
# function against the bytes that are really allocated, and plan a card with it.
#
# You need [chapter 2](02_cache_append.ipynb): a cache keeps K and V of every token and nothing else.

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
# ## One number first
#
# A common mistake in sizing a cache takes one line: counting the heads that ask instead of
# the heads that are kept.

# %% tags=["hide-input"]
from kvlab import costs
from kvlab.configs import preset
from kvlab.notebook.display import figure, say, table
from kvlab.sheet import units

llama = preset("llama-3-8b")
right_rate = costs.kv_bytes_per_token(llama)
wrong = costs.bytes_per_token_from_query_heads(llama)
say(
    f"**{llama.name} keeps {units.binary_bytes(right_rate)} a token in bf16.** Sized from its "
    f"{llama.num_heads} query heads it would be {units.binary_bytes(wrong)}: "
    f"**{wrong // right_rate} times** as much, on every token of every user."
)

# %% [markdown]
# ## Heads that ask, heads that are kept
#
# In the original transformer (multi-head attention, MHA) every query head had its own K and V. But a
# query is used once and thrown away, while K and V stay. So it pays to have fewer of the second
# kind. Multi-query attention (MQA; Shazeer, 2019) keeps one K and one V for all queries.
# Grouped-query attention (GQA; Ainslie et al., 2023) is the middle: $h$ query heads in groups, one KV
# head a group, $h_{kv}$ in all.
#
# Move *KV heads* from MHA down to MQA. The picture shows who reads whom, the table the bytes. Its last
# row is a latent model (MLA), which comes below.

# %% tags=["hide-input"]
from kvlab.notebook.widgets import show
from kvlab.notebook.widgets.costs import Shapes

show(Shapes("smollm2-135m"))

# %% [markdown]
# Here are the tensors of one layer of the real checkpoint, when it reads a prompt.

# %%
import torch

from kvlab.checkpoint import load

checkpoint = load(device="cpu")  # looked at number by number
model, spec = checkpoint.model, checkpoint.spec
print(checkpoint.source)
print("query heads", spec.num_heads, " KV heads", spec.num_kv_heads, " head size", spec.head_dim)

# %%
prompt_ids = checkpoint.encode("The shapes of a cache follow from four constants of the model")
seen = {}

from kvlab.attention import attention


def catch(layer, query, key, value):
    """Remember what layer 0 was given; attend as always."""
    if layer == 0:
        seen.update(query=query, key=key, value=value)
    return attention(query, key.transpose(1, 2), value.transpose(1, 2))


# %%
positions = torch.arange(len(prompt_ids))[None]
model.forward(torch.tensor([prompt_ids]), positions, catch)
for name, tensor in seen.items():
    print(f"{name:6}", list(tensor.shape), "= [batch, tokens, heads, d_h]")

# %% [markdown]
# Three query heads read the same KV head. The rule is one integer division: query head $j$ reads KV
# head $j \mathbin{//} (h / h_{kv})$, so the heads of a group sit side by side. Here it is, one head at
# a time, for the last token of the prompt, which may look at all of them.

# %%
h, h_kv, d_h = spec.num_heads, spec.num_kv_heads, spec.head_dim
query, key, value = seen["query"][0, -1], seen["key"][0], seen["value"][0]


def by_hand(query, key, value, owner):
    """query [h, d_h]; key, value [tokens, h_kv, d_h] -> [h, d_h]. owner(j): the KV head of j."""
    rows = []
    for j in range(h):
        scores = key[:, owner(j)] @ query[j] / d_h**0.5
        rows.append(scores.softmax(0) @ value[:, owner(j)])
    return torch.stack(rows)


# %%
ours = by_hand(query, key, value, owner=lambda j: j // (h // h_kv))
kvlabs = attention(query[None, None], key[None].transpose(1, 2), value[None].transpose(1, 2))
print("kvlab's attention agrees:", torch.allclose(ours, kvlabs[0, 0], atol=1e-5))
print("who reads whom:", [j // (h // h_kv) for j in range(h)])

# %% [markdown]
# The usual way to get the rule wrong is to tile the KV heads: `%` where `//` belongs, or `repeat`
# where `repeat_interleave` belongs. It runs without a word, and every shape is right. Note when it
# hides: with one KV head, or with as many as query heads, both orders are the same. A test needs a
# shape in between.

# %%
order = torch.arange(h_kv)
print("repeated:", order.repeat_interleave(h // h_kv).tolist())
print("tiled:   ", order.repeat(h // h_kv).tolist())

tiled = by_hand(query, key, value, owner=lambda j: j % h_kv)
print("same shape:", tiled.shape == ours.shape, "  same numbers:", torch.allclose(tiled, ours))


# %% [markdown]
# ## Never expand what you keep
#
# Plain attention code wants as many K as Q, so it often repeats K and V first. If that happens before
# the write, results are right and the cache is $h / h_{kv}$ times too large. If it happens after the
# read, every step copies the whole cache. Neither is needed: fold the group into the query axis
# instead. A group of three queries over one K is just a small matrix product.

# %%
def folded(query, key, value):
    """query [h, d_h]; key, value [h_kv, tokens, d_h]. Nothing is repeated."""
    grouped = query.view(h_kv, h // h_kv, d_h)
    scores = grouped @ key.transpose(1, 2) / d_h**0.5
    return (scores.softmax(-1) @ value).view(h, d_h)


same = folded(query, key.transpose(0, 1), value.transpose(0, 1))
print("folded agrees:", torch.allclose(same, ours, atol=1e-5))

# %% [markdown]
# How much does it save? First a guess. Then a clock, on Llama's shape, one query over a long
# context, through PyTorch's own attention: folded, with its grouped flag, and with K and V repeated.

# %%
from kvlab.notebook.widgets.practice import Predict

group = llama.num_heads // llama.num_kv_heads
show(
    Predict(
        question="Repeating K and V and then attending moves how many times the bytes of K and V?",
        answer=1 + 2 * group,
        explanation="Read them once, write the repeated copies, read those: 1 + group + group.",
    )
)

# %% tags=["nbval-ignore-output"]
# A clock: yours will differ.
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvlab.notebook.measure import in_turns, medians

q = torch.randn(1, 32, 1, 128)
k, v = torch.randn(2, 1, 8, 2048, 128)
ways = {
    "folded": lambda: sdpa(q.view(1, 8, 4, 128), k, v),
    "grouped flag": lambda: sdpa(q, k, v, enable_gqa=True),
    "repeated": lambda: sdpa(q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1)),
}
clock = medians(in_turns(ways, rounds=9))
rows = [{"way": name, "time": units.seconds(t), "of folded": f"{t / clock['folded']:.1f}"}
        for name, t in clock.items()]
table(rows, "One query over a long context, on this machine")
say(
    f"The bytes alone say {1 + 2 * group} times, the clock says "
    f"{clock['repeated'] / clock['folded']:.0f}. Where the clock says more, look at what the bytes leave "
    "out: every copy asks for fresh memory."
)

# %% [markdown]
# ## Four constants and one variable
#
# What is kept, then? One row of K and one of V, for each KV head, in each layer, for each of $m$
# tokens:
#
# $$\text{bytes}(m) = L \cdot h_{kv} \cdot (d_k + d_v) \cdot b \cdot m$$
#
# Four constants of the model (a row of K is $d_k$ numbers wide, one of V $d_v$; mostly both are
# $d_h$), the bytes $b$ of a number, and one variable. Query heads are not in it. Neither is the number
# of sequences: many short ones or one long one, the same tokens take the same room. A formula is a
# claim about memory, so we hold it to the memory.

# %%
from kvlab.cache import ContiguousKVCache

rows = []
for batch, tokens, dtype in ((1, 100, torch.float32), (4, 25, torch.float32), (2, 64, torch.bfloat16)):
    cache = ContiguousKVCache(spec, batch, tokens, dtype=dtype)
    formula = costs.kv_bytes(spec, batch * tokens, dtype.itemsize)
    rows.append({"batch x tokens": f"{batch} x {tokens}", "dtype": str(dtype)[6:],
                 "formula": f"{formula:,}", "allocated": f"{cache.nbytes:,}"})
table(rows, "The formula and the tensors of kvlab's cache, in bytes")

# %% [markdown]
# The same holds for a cache that kvlab did not write. This is the one that `transformers` fills, for
# three small random models of different families. The third is latent: one narrow row a token.

# %%
from transformers import AutoConfig, AutoModelForCausalLM

from kvlab.checkpoint import cache_of
from kvlab.configs import read_config

toy = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
       "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16}
latent = {**toy, "head_dim": 8, "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
          "qk_rope_head_dim": 8, "v_head_dim": 12, "q_lora_rank": 24, "first_k_dense_replace": 2}
families = {"llama": toy, "gemma2": {**toy, "sliding_window": 64}, "deepseek_v3": latent}


# %%
def held(config):
    """Bytes of K and V after twenty tokens, and the spec that kvlab reads from the same config."""
    loaded = AutoConfig.for_model(**config)
    network = AutoModelForCausalLM.from_config(loaded, dtype=torch.float32).eval()
    with torch.no_grad():
        layers = cache_of(network(torch.arange(20)[None], use_cache=True)).layers
    total = sum(t.numel() * t.element_size() for x in layers for t in (x.keys, x.values))
    return total, read_config(loaded.to_dict())


for model_type, config in families.items():
    total, read = held({**config, "model_type": model_type})
    print(f"{model_type:12} held {total:6,} bytes, formula {costs.kv_bytes(read, 20, 4):6,}")

# %% [markdown]
# ## A config goes in
#
# The four constants stand in a model's `config.json`, more or less. Less, because the file has
# changed over the years. Old models say `n_head`. Some give `head_dim`, which is then not the hidden
# size divided by the heads. Multimodal files hide the language model one level down. Which layers
# have a window often stands in no key at all: the model type implies it.
#
# So `read_config` resolves one record a layer, and notes what it had to decide.

# %%
gemma = read_config({
    "model_type": "gemma2", "num_hidden_layers": 6, "hidden_size": 3584,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "sliding_window": 4096,
    "vocab_size": 256000,
})
rows = [
    {"layer": index, "kind": layer.kind, "KV heads": layer.num_kv_heads, "width": layer.key_dim,
     "window": "none" if layer.window is None else f"{layer.window:,}"}
    for index, layer in enumerate(gemma.layers)
]
table(rows, "What read_config made of it, layer by layer",
      note=" ".join(f"Noted: {note}." for note in gemma.notes))

# %% [markdown]
# What cannot be read is an error that names the field. There is no default model to fall back on: a
# plan with a silent guess in it is worse than no plan.

# %%
from kvlab.configs import ConfigError

broken = {"num_hidden_layers": 64, "hidden_size": 5120, "num_attention_heads": 24}
for config in (broken, {**broken, "head_dim": "256"}, {**broken, "head_dim": 256, "n_head": 20}):
    try:
        read_config(config)
    except ConfigError as error:
        print(f"[{error.field}] {error}\n")


# %% [markdown]
# ## Not every layer keeps the same
#
# Once layers differ, bytes stop being a rate. A layer with a *window* sees the last so many tokens
# only, its own included (one too many is a quiet mistake): it grows until the window is full, then the
# oldest row makes room for the newest. A recurrent layer (Mamba, linear attention) keeps a state of
# fixed size from the first token on. A layer may read the K and V of an earlier one and keep none.
#
# So the cost is a sum over layers. A layer that keeps no K and V has 0 KV heads here. A fixed state is
# no K or V: `costs.sequence_bytes` adds it, and the figure below takes that one.

# %%
def bytes_of(spec, tokens):
    """K and V of one sequence, in two bytes a number."""
    total = 0
    for layer in spec.layers:
        rows = tokens if layer.window is None else min(tokens, layer.window)
        total += rows * layer.num_kv_heads * (layer.key_dim + layer.value_dim) * 2
    return total


# %%
from kvlab.configs import model_names

for name in model_names():
    for tokens in (1, 1000, 100_000):
        assert bytes_of(preset(name), tokens) == costs.kv_bytes(preset(name), tokens)
print("equal to costs.kv_bytes for all", len(model_names()), "models of the book")

# %% tags=["hide-input"]
shown = ("llama-3-8b", "gemma-3-27b", "gpt-oss-20b", "deepseek-v3", "jamba-v0.1", "mistral-7b-v0.1")
contexts = [2**i for i in range(10, 18)]
figure(
    {
        preset(name).name: (
            contexts,
            [costs.sequence_bytes(preset(name), n) / 2**30 for n in contexts],
        )
        for name in shown
    },
    x="tokens of one sequence",
    y="GiB kept",
    title="What one sequence keeps",
    alt="GiB kept by one sequence against its length for six models; windows bend two of the lines, "
    "and one with windows on every layer goes flat",
    log_x=True,
    log_y=True,
)

# %% [markdown]
# Llama and DeepSeek attend in full: twice the tokens, twice the bytes. Mistral's line goes flat where
# its windows are full, since every layer has one. Gemma's starts flat: most of its layers have a short
# window, which is full already, and the few full layers take over later. Jamba is lifted at the left
# end by a state that is there from the first token on.
#
# The table takes one long context, and two ways to be wrong: windows forgotten, and query heads
# counted.

# %% tags=["hide-input"]
n = 131_072
rows = []
for name in shown:
    one = preset(name)
    right = costs.sequence_bytes(one, n)
    full = costs.sequence_bytes(costs.padded_to_full(one), n)
    naive = n * costs.bytes_per_token_from_query_heads(one)
    rows.append({
        "model": one.name,
        "needed": units.binary_bytes(right),
        "windows charged in full": units.binary_bytes(full),
        "query heads, all layers": units.binary_bytes(naive),
        "last / needed": f"{naive / right:.1f}",
    })
table(rows, f"One sequence of {n:,} tokens, bf16", note="An engine that keeps no pool of its own for "
      "windowed layers really hands out the second figure.")

# %% [markdown]
# ## One row for all heads
#
# Multi-head latent attention (DeepSeek-V2) keeps something else: one compressed row a token, from
# which the K and V of all heads can be computed, and a short rotated part that all heads share. It is
# kept once, because the same row serves as K and as V. Writing K and V out for every head is the same
# mathematics in another layout, and some engines did it. So a tool must ask which layout is meant.

# %%
deepseek = preset("deepseek-v3")
row = deepseek.layers[0]
print("kept:     1 row of", row.key_dim, "numbers a layer")
print("expanded:", row.expanded.num_kv_heads, "heads of", row.expanded.key_dim, "+", row.expanded.value_dim)

# %% tags=["hide-input"]
latent_rate = costs.kv_bytes_per_token(deepseek)
expanded_rate = costs.kv_bytes_per_token(costs.expanded(deepseek))
say(
    f"{deepseek.name} keeps {latent_rate:,} bytes a token as a latent row and {expanded_rate:,} "
    f"written out, **{expanded_rate / latent_rate:.1f} times** as much. Its `config.json` says "
    f"`num_key_value_heads` {deepseek.num_kv_heads}, which is true of the second layout only."
)

# %% [markdown]
# ## The same bytes, other strides
#
# K of one layer has three axes: token (N), head (H), number (D). Two orders are in use.
# **Token-major** (NHD) keeps all heads of a token together: one write for a new token. **Head-major**
# (HND) keeps all tokens of a head together: one long read for attention. A third choice is one tensor
# for K and V. All of them hold the same numbers in the same amount of memory. What differs are the
# *strides*: how far apart in memory two neighbours on an axis lie.

# %%
tokens = 4
nhd = torch.arange(tokens * h_kv * 2).view(tokens, h_kv, 2)
hnd = nhd.transpose(0, 1).contiguous()
fused = torch.stack((nhd, nhd + 100))
for name, tensor in {"NHD": nhd, "HND": hnd, "K and V fused": fused}.items():
    print(f"{name:14} shape {list(tensor.shape)!s:14} strides {list(tensor.stride())}")

# %% [markdown]
# A transposed view of one is the other, for free, as long as strides are respected. The bug is to
# take memory in one order and call it the other: `view` or `reshape` instead of `transpose`. The
# shape is right and no error comes. Converting nothing at all is a second bug. There the shape tells,
# unless the number of tokens equals the number of heads.

# %%
right_view = nhd.transpose(0, 1)
confused = nhd.reshape(h_kv, tokens, 2)
print("same shape:", right_view.shape == confused.shape)
print("head 0, right:   ", right_view[0].tolist())
print("head 0, confused:", confused[0].tolist())

# %% tags=["hide-input"]
moved = int((right_view != confused).any(-1).sum())
rows = [
    {"head": i, **{f"token {t}": f"token {int(confused[i, t, 0]) // (2 * h_kv)}, head "
     f"{int(confused[i, t, 0]) // 2 % h_kv}" for t in range(tokens)}}
    for i in range(h_kv)
]
table(rows, "Whose row stands where, after the confusion", note=f"{moved} of {tokens * h_kv} rows "
      "are somebody else's. With a single token both orders are the same memory, and a test finds nothing.")

# %% [markdown]
# ## The bugs of this chapter
#
# In kvlab each mistake of this chapter is a switch. Here they are, each on, then caught on a tiny
# model. The detectors compare what was written with what is read back, head by head, the keys that a
# query sees with those in its window, and bytes held with bytes planned.

# %%
from kvlab.faults import FaultDetected, fault

bugs = ("heads_tiled", "heads_expanded_before_write", "layout_confused", "window_off_by_one")
for name in bugs:
    with fault(name) as entry:
        try:
            entry.detect()
            print(name, "was not caught")
        except FaultDetected as found:
            print(f"{name}\n    {entry.symptom}\n    caught: {found}\n")

# %% [markdown]
# ## Split over cards
#
# *Tensor parallelism* splits the heads of a model over $T$ cards. KV heads split too, as long as there are enough.
# With more cards than KV heads, heads are copied, and each further card saves nothing. A latent row
# belongs to all heads, so every card keeps all of it.

# %% tags=["hide-input"]
rows = []
for name in ("llama-2-7b", "llama-3-8b", "falcon-40b", "deepseek-v3"):
    one = preset(name)
    each = {t: costs.kv_bytes_per_token(costs.per_rank(one, t)) for t in (1, 2, 8, 16)}
    rows.append({"model": one.name, "KV heads": one.num_kv_heads,
                 **{f"T = {t}": f"{b:,}" for t, b in each.items()}})
table(rows, "Bytes a token on each of T cards, bf16")

# %% [markdown]
# ## Fewer bits
#
# The last factor is $b$. fp8 halves the cache. In the other formats the numbers of a block share a
# scale, and the scales take room: q8_0 stays above one byte a number, the four-bit ones above half a
# byte. So $b$ is a fraction, and it is exact.

# %% tags=["hide-input"]
from kvlab.costs import FORMATS

rows = [
    {"format": f.name, "bytes a number": str(f.bytes_per_element),
     "a token": f"{int(costs.kv_bytes_per_token(llama, f.bytes_per_element)):,}",
     "of bf16": f"{float(f.bytes_per_element) / 2:.1%}"}
    for f in FORMATS.values() if f.name in ("bf16", "fp8", "q8_0", "mxfp4", "nvfp4", "q4_0")
]
table(rows, f"{llama.name} in other formats")

# %% [markdown]
# ## What fits on a card
#
# Now a plan. A card's box gives its memory in GB, powers of ten. Its driver reports MiB, and finds more
# bytes than the box says, because memory is made in powers of two. An engine takes a share of it; this
# plan takes 0.9. Weights come off first. vLLM (`gpu_memory_utilization`) then takes off what a forward
# needs for itself, activations and captured graphs; SGLang (`mem_fraction_static`) leaves those outside
# its share. This plan charges nothing for them, so its answer is an upper bound. What is left is the
# *pool* of the cache. Whether 64 sequences of 8,192 tokens fit depends on which of these figures you start from.

# %% tags=["hide-input"]
from kvlab.configs import hardware
from kvlab.sheet import ask_capacity

card = hardware("h100-sxm")
load_bytes = 64 * costs.kv_bytes(llama, 8192)
weights = costs.weight_bytes(costs.resident_params(llama))
budgets = {
    "what the box says": card.memory_bytes,
    "what the driver reports": card.driver_memory_bytes,
    "0.9 of what the driver reports": card.driver_memory_bytes * 9 // 10,
}
rows = [
    {"budget": name, "bytes": units.both_bytes(budget),
     "weights and load": units.both_bytes(weights + load_bytes),
     "fits": "yes" if weights + load_bytes <= budget else "no"}
    for name, budget in budgets.items()
]
table(rows, f"{llama.name}, 64 sequences of 8,192 tokens, on one {card.name}")

# %%
plan = ask_capacity(model="llama-3-8b", card="h100-sxm", tokens=8192, sequences=64)
for key in ("pool_bytes", "bytes_per_sequence", "needed_bytes"):
    print(f"{key:20}", units.both_bytes(plan[key]))
print("sequences that fit  ", plan["sequences_that_fit"])
print("blocks, tokens      ", plan["num_blocks"], plan["pool_tokens"])

# %% [markdown]
# (An engine hands the pool out in blocks of a few tokens; chapter 5 builds that.) The planner below asks the same function. Change the card, the share, the format, the load. Paste
# any `config.json` into it: it is read on your side, by this book's own Python, and goes nowhere.

# %%
from kvlab.notebook.widgets.sheet import Capacity

show(Capacity())

# %% [markdown]
# One warning. Engines print "cache size: so many tokens", and it is tempting to plan with that
# number. It is a capacity only where every token costs the same. With a fixed state or windows, the
# number of sequences is the pool divided by fixed part plus growing part, and half the context does
# not mean twice the sequences.

# %% tags=["hide-input"]
pool = 20 * 2**30
rows = []
for name in ("llama-3-8b", "jamba-v0.1", "gpt-oss-20b"):
    one = preset(name)
    fits = {t: costs.sequences_that_fit(one, pool, t) for t in (512, 1024, 2048)}
    rows.append({"model": one.name, **{f"{t:,} tokens": f"{f:,}" for t, f in fits.items()},
                 "first / last": f"{fits[512] / fits[2048]:.2f}"})
table(rows, f"Sequences in a pool of {units.binary_bytes(pool)}",
      note="Four times the context: four times fewer sequences only on the first row.")

# %% [markdown]
# ## Exercises
#
# As a page: the [exercises page](../book/progress.md) checks your answers in the browser.
#
# **3.1** Qwen3-32B: 64 layers, `hidden_size` 5120, 64 query heads, 8 KV heads, `head_dim` 128. How
# many bytes does one token keep in bf16?

# %%
from kvlab.notebook.exercises import check, hint, status

answer = None  # your answer here
check("3.1", answer)

# %% [markdown]
# <details><summary>Solution of 3.1</summary>
#
# `64 * 8 * (128 + 128) * 2`. The hidden size is not in it: `head_dim` is declared, and it is not
# `5120 / 64`.
#
# </details>
#
# **3.2** Gemma-3-27B attends in full on some layers and slides on the others; the cell says on how
# many. How many bytes does one long sequence need in bf16?

# %%
answer = None  # your answer here
check("3.2", answer)


# %% [markdown]
# <details><summary>Solution of 3.2</summary>
#
# `16 * 256 * 2 * (10 * 32768 + 52 * 1024)`: a window that is full stays as it is.
#
# </details>
#
# **3.3** Write the rule: which KV head does query head `j` read?

# %%
def kv_head(j, num_heads, num_kv_heads):
    """The KV head of query head j."""


check("3.3", kv_head)

# %% [markdown]
# <details><summary>Solution of 3.3</summary>
#
# `return j // (num_heads // num_kv_heads)`. With `%` the heads are tiled: right for one KV head and
# for MHA, wrong in between.
#
# </details>
#
# **3.4** DeepSeek-V3 keeps one latent row of 512 + 64 numbers a token in each of its layers. Split over
# 8 tensor-parallel cards, how many bytes does one token keep on *each* card, in bf16?

# %%
answer = None  # your answer here
check("3.4", answer)

# %% [markdown]
# <details><summary>Solution of 3.4</summary>
#
# `61 * (512 + 64) * 2`, on every card. Cards split heads, and the row belongs to all of them.
#
# </details>

# %%
status(3)

# %% [markdown]
# ## In the engines
#
# vLLM (commit a556f3f) computes `q_size` and `kv_size` side by side in `models/llama.py` L157-L158,
# from the heads of one rank. Its cache spec has one entry a layer: bytes of a cell are
# `(head_size + head_size_v)` times the size of the data type, and a page is heads times block size
# times cell. Layers with windows form groups of their own, and a backend names its cache's shape
# (`v1/attention/backend.py` L89-L96), because layouts differ between kernels. SGLang keeps a list of K
# and a list of V buffers, one a layer, with HND as an option.

# %% [markdown]
# ## What it cost, what comes next
#
# You have grouped attention that repeats nothing, and the size of a cache as arithmetic on a config,
# once the config is read right.

# %% tags=["hide-input"]
mha = costs.bytes_per_token_from_query_heads(llama)
say(
    f"**What it cost**: a function in place of a rate. {len(model_names())} configs are read, layer by "
    f"layer, and one sequence of {n:,} tokens takes from "
    f"{units.binary_bytes(min(costs.sequence_bytes(preset(name), n) for name in shown))} to "
    f"{units.binary_bytes(max(costs.sequence_bytes(preset(name), n) for name in shown))} in the "
    f"{len(shown)} models of the figure (bf16).",
    f"**What it made possible**: {llama.name} keeps {units.binary_bytes(right_rate)} a token where "
    f"a KV head for every query head would keep {units.binary_bytes(mha)}, so one {card.name} holds "
    f"at most {plan['sequences_that_fit']} sequences of 8,192 tokens. That number was planned from a file, before "
    f"anything was allocated.",
)

# %% [markdown]
# One thing was left out. What lands in the cache is not K as the projection made it, but K turned by
# its position. Positions must be right *before* the write: [chapter 4](04_rope_before_write.ipynb).
# All models of this chapter stand in a [table](../book/models.md) that you can sort.
#
# **References.** Shazeer 2019, Ainslie et al. 2023, DeepSeek-V2. See the
# [references page](../book/references.md).
