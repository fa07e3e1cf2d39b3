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
# # 1. Naive decode
#
# [**Open in Colab**](https://colab.research.google.com/github/OWNER/kvlab/blob/main/chapters/01_naive_decode.ipynb)
#
# **What does a language model do again and again when it writes one token at a time?**
#
# You build the simplest loop that generates text: run the whole sequence through the model, take
# the most likely next token, append it, and start over. Then you count what it repeats. That
# count is the reason why every inference engine has a KV cache.
#
# You need to know what a decoder layer is (attention, then an MLP) and to read a little PyTorch.

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
# ## One picture first
#
# Each row is one pass of the model, each cell one token in it: its *key* and its *value*, the two
# vectors that later tokens look at. The loop of this chapter feeds all tokens again in every pass.
# Press *Play*. Then tick *with a KV cache*, and see what is left to compute.

# %% tags=["hide-input"]
from kvlab.configs import preset
from kvlab.notebook.widgets import show
from kvlab.notebook.widgets.costs import Recompute

show(Recompute(preset("smollm2-135m")))

# %% [markdown]
# ## One number
#
# The book has one *running example*: Llama-3-8B reads a prompt of 2,048 tokens, and 512 decode
# steps follow. Here is the arithmetic of those steps, when each runs the whole sequence again, and
# when it does not. It is counted in FLOPs: one addition or one multiplication is one FLOP.

# %% tags=["hide-input"]
from kvlab import costs
from kvlab.notebook.display import figure, say, table
from kvlab.sheet import cost_report, units

llama = preset("llama-3-8b")
run = cost_report(llama, prompt=2048, decode=512)
naive_flops = run["uncached"]["total_flops"]
cached_flops = run["cached"]["total_flops"]
say(
    f"**{run['decode']} decode forwards after a prompt of {run['prompt']:,} tokens:** "
    f"{units.flops(naive_flops)} without a cache, {units.flops(cached_flops)} with one. "
    f"The naive loop does **{run['ratio']:,.0f} times** the arithmetic for the same text. "
    f"({run['accounting'].capitalize()}: P = {run['num_parameters']:,}. Contexts from "
    f"{run['prompt'] + 1:,} to {run['prompt'] + run['decode']:,} tokens.)"
)

# %% [markdown]
# *Coarse* takes the parameter count of a model card: all weights that lie in memory (*resident*), to
# three digits. *Exact* takes the matrices that a step multiplies by (`streamed_params` in code): those
# of all layers, and the *output head*, which turns the last hidden state into logits. Looking up a
# token's vector does not count. Every number in this book says which one it uses. The rest of this chapter takes the larger figure apart.

# %% [markdown]
# ## A real model
#
# The model of this book is SmolLM2-135M, small enough for a laptop and built like Llama: the same
# layers, the same grouped attention, the same rotary positions. The first call fetches it; later
# ones take a second or two.

# %%
import torch

from kvlab.checkpoint import load

checkpoint = load(dtype=torch.float32)  # on the GPU if there is one; exact enough to compare
model, spec = checkpoint.model, checkpoint.spec
print(checkpoint.source)
print(spec.num_layers, "layers,", spec.num_heads, "query heads,", spec.num_kv_heads, "KV heads")

# %% tags=["nbval-ignore-output"]
# Depends on the machine: yours may differ.
from kvlab.notebook.measure import runtime

print(runtime(model))

# %%
prompt = "The capital of France is Paris. The capital of Italy is"
prompt_ids = checkpoint.encode(prompt)
print(len(prompt_ids), "tokens:", prompt_ids)

# %% [markdown]
# ## The loop, by hand
#
# The decoder takes three things from outside: token ids, their positions, and a function that does
# the attention. It calls that function once in each layer, with Q, K and V of the tokens that were fed.
# For each query, attention takes the dot product with every key up to its own, turns these scores into
# shares that sum to one (a softmax), and mixes the values in these shares. Our function keeps nothing.
#
# A *head* is a slice of the vectors in which attention runs on its own. Letters: $s$ tokens, $h$ query
# heads, $h_{kv}$ heads of K and V (why fewer: chapter 3), $d_h$ numbers in a head, $L$ layers. All
# letters and words are on the [notation page](../book/notation.md).

# %%
from kvlab.attention import attention


def forget(layer, query, key, value):
    """query [1, s, h, d_h], key and value [1, s, h_kv, d_h]; nothing is kept."""
    return attention(query, key.transpose(1, 2), value.transpose(1, 2))


# %%
ids = list(prompt_ids)
for _ in range(12):
    tokens = torch.tensor([ids], device=model.device)
    positions = torch.arange(len(ids), device=model.device).view(1, -1)
    logits = model.forward(tokens, positions, forget)
    ids.append(int(logits[0, -1].argmax()))

by_hand = ids[len(prompt_ids) :]
print(checkpoint.decode(by_hand))

# %% [markdown]
# That is greedy decoding. Note the last line of the loop: of all the rows of logits that came
# back, it reads one.
#
# kvlab has the same loop, with a stop token, a limit on the context and a hook that is called
# after every forward. It must write the same text.

# %%
from kvlab.generate import naive_generate

from_kvlab = naive_generate(model, prompt_ids, 12)
assert from_kvlab == by_hand
print("the two loops agree on", len(by_hand), "tokens")

# %% [markdown]
# ## What comes back, and what is used
#
# Each forward returns one row of logits a token: a score for every word of the vocabulary, at
# every position. The next token needs the last row only. Let us watch the rows of six forwards.
# The first one is *prefill*, $t = 0$: it reads the prompt. The decode steps follow, $t = 1, 2,
# \dots$, and at step $t$ the processed context is $s_t = p + t$ tokens.

# %%
import pandas as pd

steps = []
naive_generate(model, prompt_ids, 6, on_step=steps.append)

rows = pd.DataFrame(
    {
        "t": [step.t for step in steps],
        "tokens fed": [step.seq_len for step in steps],
        "rows of logits": [step.num_rows for step in steps],
        "thrown away": [step.num_rows - 1 for step in steps],
    }
).set_index("t")
table(rows, "Rows of logits, prefill and five decode steps")


# %% [markdown]
# At prefill the other rows have a use in training, and none here. In the decode steps they are
# worse than useless: they were computed before, by the step before, and thrown away then too.
#
# Convention for the whole book: prefill samples the first output, and $n$ decode forwards give
# $n + 1$ outputs in all. The last output is sampled and never fed back.

# %% [markdown]
# ## The same K and V, every step
#
# Logits are the visible waste. The larger one lies inside. Each layer turns each token into a
# query, a key and a value. We keep the keys and values of two forwards that follow each other,
# and compare the tokens that both of them were fed.

# %%
def keys_and_values(ids):
    """K and V of every layer, each [s, h_kv, d_h], from one naive forward."""
    kept = []

    def keep(layer, query, key, value):
        kept.append((key[0].clone(), value[0].clone()))
        return forget(layer, query, key, value)

    tokens = torch.tensor([ids], device=model.device)
    model.forward(tokens, torch.arange(len(ids), device=model.device).view(1, -1), keep)
    return kept


before = keys_and_values(ids[:-1])
after = keys_and_values(ids)

# %%
old = len(ids) - 1
same = [
    torch.allclose(k[:old], k0, atol=1e-3) and torch.allclose(v[:old], v0, atol=1e-3)
    for (k0, v0), (k, v) in zip(before, after, strict=True)
]
print(f"layers whose {old} old keys and values came out the same: {sum(same)} of {len(same)}")

# %% [markdown]
# Every layer, every old token: the new token changed nothing before it. It could not. The causal
# mask lets a token see only itself and what stands before it. So the *hidden state* of token $i$, the
# vector that one layer hands to the next, depends on tokens up to $i$ behind layer 0 (code counts from
# 0), and so behind layer 1, and behind all of them.
#
# The loop computes these vectors again only because it did not keep them.

# %% [markdown]
# ## Count the waste
#
# `CountingAttention` counts the K/V rows (the K and V of one token in one layer) that a decoder
# produces. Step $t$ makes $s_t$ rows a layer. One is new; the other $s_t - 1$ were made before.

# %%
from kvlab.attention import CountingAttention, UncachedAttention

p, n = len(prompt_ids), 8
counter = CountingAttention(UncachedAttention(spec))
naive_generate(model, prompt_ids, n + 1, attend=counter)

prefill_rows = spec.num_layers * p
new_rows = spec.num_layers * n
counted = counter.kv_rows - prefill_rows - new_rows
predicted = costs.kv_rows_recomputed(spec, p, n)
assert counted == predicted
print(f"counted {counted:,} repeated rows in {n} steps; the closed form says {predicted:,}")

# %% [markdown]
# The closed form is a sum over the steps, $L \sum_{t=1}^{n} (p + t - 1)$. It grows with $n^2$,
# and with the prompt times $n$. In the picture at the top it is the number of cells that are
# computed again, once for each layer: set $p$ and $n$ there to those of this cell, and compare.

# %% [markdown]
# ## What one step costs
#
# Two kinds of work, and they grow differently. The *projections* multiply every token by every
# weight matrix. Each of the $P$ parameters costs one multiplication and one addition a token: $2Ps$.
# *Attention* compares pairs of tokens. The score is a dot product of $d_h$ numbers, the mix adds $d_h$
# numbers times a share: $2 d_h$ FLOPs each, so $4 d_h$ a pair, in each of $h$ heads and $L$ layers. The
# causal mask leaves about half of the $s^2$ pairs; we count half:
#
# $$F_u(s) = 2Ps + \tfrac{1}{2} \cdot 4 h d_h L s^2$$
#
# The first term doubles with the context, the second one quadruples.

# %%
P = run["num_parameters"]
parts = []
for s in (512, 1024, 2304, 2560, 8192, 32_768):
    projections = costs.projection_flops(P, s)
    pairs = costs.attention_flops_uncached_step(llama, s)
    parts.append((f"{s:,}", units.flops(projections), units.flops(pairs), f"{pairs / projections:.1%}"))

table(
    pd.DataFrame(parts, columns=["s", "projections", "attention", "attention / projections"]).set_index("s"),
    "One uncached step of Llama-3-8B, coarse accounting",
)

# %% [markdown]
# At the contexts of a chat, attention is the small part. The naive loop is slow because it pushes
# the whole sequence through the *weights* again. The square in the formula takes over much later.

# %% [markdown]
# ## Predict, then measure
#
# How does the time of a step grow on your machine? Commit to a guess first: how many times longer
# does a naive step take at 512 tokens than at 64?

# %%
from kvlab.notebook.widgets.practice import Predict

flops_exact = {
    s: costs.uncached_step_flops(spec, costs.streamed_params(spec), s) for s in (64, 128, 256, 512)
}
show(
    Predict(
        question="A naive step at 512 tokens takes how many times as long as one at 64?",
        answer=flops_exact[512] / flops_exact[64],
        explanation="The ratio of the FLOPs, exact accounting. The measurement below adds your machine.",
    )
)

# %% tags=["nbval-ignore-output"]
# A clock: yours will differ.
from kvlab.notebook.measure import in_turns, medians


def naive_step(s):
    """A call that makes one naive forward over s tokens."""
    tokens = torch.tensor([[prompt_ids[i % p] for i in range(s)]], device=model.device)
    positions = torch.arange(s, device=model.device).view(1, -1)
    return lambda: model.forward(tokens, positions, forget)


measured = medians(in_turns({s: naive_step(s) for s in flops_exact}, rounds=3))
print(f"512 tokens against 64: {measured[512] / measured[64]:.1f} times as long")

# %% [markdown]
# The model for the time has one constant: the FLOPs of the step, divided by the rate at which
# this machine does them. We take the rate from the longest context and see how well it tells
# the others.

# %% tags=["nbval-ignore-output"]
# A clock: yours will differ.
rate = flops_exact[512] / measured[512]
fit = {s: costs.compute_seconds(flops, rate) for s, flops in flops_exact.items()}
figure(
    {
        "measured": ([*measured], [1e3 * t for t in measured.values()]),
        "FLOPs / rate": ([*fit], [1e3 * t for t in fit.values()]),
    },
    x="context s, tokens",
    y="milliseconds",
    title="One naive step on this machine",
    colours={"measured": "waste", "FLOPs / rate": "waste"},
    alt="Time of a naive step against context: measured, and predicted from the FLOPs",
)

# %% tags=["nbval-ignore-output", "hide-input"]
# A clock: yours will differ.
say(
    f"This machine did {units.flops(rate)} a second at 512 tokens. At 64 tokens the prediction is "
    f"{fit[64] / measured[64]:.0%} of the measured time. A step also pays what does not grow with "
    f"its tokens, every weight read and every operation started once, and small matrix products do "
    f"not reach the rate of large ones. Chapter 8 takes these apart."
)

# %% [markdown]
# ## Two bugs of this chapter
#
# A loop this short has room for mistakes that raise nothing. The book keeps a register of such
# faults: each can be switched on in one line, and each has a detector. Here is the model without
# its causal mask. All shapes are right.

# %%
from kvlab.faults import FaultDetected, fault, get

with fault("causal_mask_missing"):
    broken = naive_generate(model, prompt_ids, 12)
print("right: ", checkpoint.decode(by_hand))
print("broken:", checkpoint.decode(broken))

# %% [markdown]
# The detector is the experiment from above: K and V of old tokens must not change when a token is
# added. Without the mask they do, in every layer but the first, whose K and V come from the
# embeddings alone. So the same property that makes a cache possible is also the test for the mask.

# %%
for name in ("causal_mask_missing", "logits_row_before_last"):
    with fault(name):
        try:
            get(name).detect()
        except FaultDetected as found:
            print(f"{name}: {found}\n")

# %% [markdown]
# The second one samples from the row before the last: it predicts the token that is already
# there. The text stutters, and nothing else tells. The [field guide](../book/bugs.md) lists the
# faults of all chapters.

# %% [markdown]
# ## Exercises
#
# Put your answer where it says so and run the cell. A wrong answer gets a hint that names the
# mistake. If you read this as a page, the [exercises page](../book/progress.md) checks your answers
# in the browser.
#
# **1.1** A prompt of 100 tokens, then 50 naive decode forwards. How many rows of logits does the
# *last* forward compute and throw away?

# %%
from kvlab.notebook.exercises import check, hint, status

answer = None  # your answer here
check("1.1", answer)

# %% [markdown]
# <details><summary>Solution of 1.1</summary>
#
# The last forward processes $s = p + n$ tokens and makes as many rows. One is sampled from:
# `100 + 50 - 1`.
#
# </details>
#
# **1.2** The same run on SmolLM2-135M. How many K/V rows do the 50 decode forwards compute that
# had been computed before?

# %%
answer = None  # your answer here
check("1.2", answer)

# %% [markdown]
# <details><summary>Solution of 1.2</summary>
#
# `costs.kv_rows_recomputed(spec, 100, 50)`, or by hand `30 * sum(100 + t - 1 for t in range(1, 51))`.
#
# </details>
#
# **1.3** You want exactly 512 output tokens. How many decode forwards follow prefill?

# %%
answer = None  # your answer here
check("1.3", answer)


# %% [markdown]
# <details><summary>Solution of 1.3</summary>
#
# One fewer than outputs: prefill has sampled the first. `512 - 1`.
#
# </details>
#
# **1.4** Write `uncached_step(P, h, d_h, L, s)`, the FLOPs of one uncached step.

# %%
def uncached_step(P, h, d_h, L, s):
    return None  # your formula here


check("1.4", uncached_step)

# %% [markdown]
# <details><summary>Solution of 1.4</summary>
#
# ```python
# def uncached_step(P, h, d_h, L, s):
#     return 2 * P * s + 4 * h * d_h * L * s * s / 2
# ```
#
# </details>

# %%
status(1)

# %% [markdown]
# ## In the engines
#
# No engine decodes like this, but each has the pieces. vLLM makes one row of logits a request, not
# one a token: `_prepare_inputs` in `vllm/v1/worker/gpu_model_runner.py` (at commit 000fc94) takes
# the last token of every request, `query_start_loc[1:] - 1`, and multiplies only those rows by the
# output head. (A prompt fed in pieces still gets a row for each piece, which is dropped; with drafts
# there is one more row for each draft.) SGLang's `LogitsProcessor` (`python/sglang/srt/layers/logits_processor.py`) cuts
# the hidden states down to the last one of each request first. kvlab's decoder has the same choice:
# `rows="last"`.
#
# And a naive forward over a half-written sequence still happens in production, once: when an
# engine runs out of memory it drops the cache of a request and later computes it again, prompt and
# outputs as one long prompt. That is *preemption by recompute*, and chapter 7 builds it.

# %% [markdown]
# ## What it cost, what comes next
#
# You have a loop that writes correct text, and a closed form, equal to a counter, for what it
# repeats.

# %% tags=["hide-input"]
again = costs.kv_rows_recomputed(llama, run["prompt"], run["decode"])
fresh = llama.num_layers * run["decode"]
dropped = costs.sum_of_contexts(run["prompt"], run["decode"]) - run["decode"]
last = costs.uncached_step_flops(llama, P, run["prompt"] + run["decode"])
say(
    f"**What it cost**, on the running example: {again:,} K/V rows computed again for {fresh:,} new "
    f"ones, and {dropped:,} rows of logits thrown away. The last step, at s = "
    f"{run['prompt'] + run['decode']:,}, takes {units.flops(last)} (coarse) to choose one token.",
    f"**What it made possible**: one observation. On the real checkpoint the keys and values of old "
    f"tokens came out the same in {sum(same)} of {len(same)} layers, so nobody has to compute them "
    f"twice.",
)

# %% [markdown]
# [Chapter 2](02_cache_append.ipynb) keeps them.
#
# **References.** The accounting of projections and attention follows Pope et al. 2022,
# *Efficiently Scaling Transformer Inference*. All references of the book are on the
# [references page](../book/references.md).
