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
# # 4. RoPE before write
#
# [**Open in Colab**](https://colab.research.google.com/github/OWNER/kvlab/blob/main/chapters/04_rope_before_write.ipynb)
#
# **Where is the position of a token kept, and what happens when it is wrong by one?**
#
# You rotate a query and a key by hand, find the rotated key in the cache, and then break the
# position on purpose. Nothing complains. You measure how far the model drifts, meet a mistake that
# no output can show, and write the one-line check that catches both.
#
# You need [chapter 2](02_cache_append.ipynb): the cache, and the loop that feeds one token a step. From
# [chapter 3](03_gqa_shapes.ipynb) come three things: several query heads share one KV head, layers may
# have a window, and `read_config` turns a config.json into a spec.
# A sine and a cosine help.

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
# A position is an angle. Rotary position embedding (RoPE) takes a query and a key, two numbers at a
# time, and turns each pair by an angle that grows with the place of the token. A *score* is the dot
# product of query and key, a sum over these pairs of numbers. Turning changes no length, so in each pair
# the position acts only through the angle between query and key.
#
# Press *Query + 1* and watch the score. Then press *Both + 1*.

# %% tags=["hide-input"]
from kvlab.configs import preset
from kvlab.notebook.widgets import show
from kvlab.notebook.widgets.positions import Rotate

show(Rotate(preset("smollm2-135m").rope))

# %% [markdown]
# ## Two texts
#
# The same model, the same prompt, the same code for everything but one number. Which of the two
# has a bug?

# %%
import torch

from kvlab.checkpoint import load
from kvlab.faults import fault
from kvlab.generate import cached_generate
from kvlab.notebook.display import say, table

checkpoint = load(device="cpu")  # looked at number by number
model, spec = checkpoint.model, checkpoint.spec

# %%
prompt_ids = checkpoint.encode("The moon is smaller than the earth. The sun is")
one = cached_generate(model, prompt_ids, 32)
with fault("decode_position_off_by_one"):
    other = cached_generate(model, prompt_ids, 32)

print("one:  ", checkpoint.decode(one))
print("other:", checkpoint.decode(other))

# %% tags=["hide-input"]
parted = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), None)
say(
    f"The weights are {checkpoint.source}. In the second text, every decoded token claims to stand "
    f"one place further on than it does. The two part at output {parted + 1}. Both read like "
    "English, no error was raised, and no shape was wrong."
    if parted is not None
    else f"The weights are {checkpoint.source}. With these the two texts are the same for "
    f"{len(one)} tokens, although every decoded token of the second claims a wrong place."
)

# %% [markdown]
# Whoever reads the second text alone does not find the bug. This chapter finds it without reading any
# text.

# %% [markdown]
# ## The rotation, by hand
#
# Attention by itself does not know order: it compares each query with each key, wherever they
# stand. RoPE writes the place into the vectors. It takes the numbers of a head in pairs and turns
# each pair, as a point in a plane, by an angle that grows with the position $m$ (in this chapter $m$ and
# $n$ are positions, not counts). Pair $i$ of $d_h / 2$ turns by $m\,\theta^{-2i/d_h}$, where $\theta$
# is the *base*, a setting of the model: the first pair turns fast, the last one hardly at all.
# $\theta^{-2i/d_h}$ is the *speed* of the pair, in radians a position.

# %%
import math


def rotate_by_hand(x, position, theta=10_000.0):
    """Turn pair (i, i + d/2) of the list x by position * theta^(-2i/d)."""
    out, half = list(x), len(x) // 2
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


by_hand = rotate_by_hand([1, 2, 3, 4, 5, 6, 7, 8], position=1)
print([round(value, 4) for value in by_hand])

# %% [markdown]
# kvlab does the same for all tokens and heads at once: one table of cosines and one of sines, with
# a row for each position and a column for each pair, and the rows of the tokens at hand.

# %%
from kvlab.rope import apply_rope, rope_tables
from kvlab.specs import RopeSpec

cos, sin = rope_tables(RopeSpec(theta=10_000.0, rotary_dim=8), torch.tensor([1]))
x = torch.arange(1.0, 9.0).view(1, 1, 8)  # [tokens, heads, d_h]
from_kvlab = apply_rope(x, cos, sin)[0, 0]

assert torch.allclose(from_kvlab, torch.tensor(by_hand), atol=1e-5)
print("equal; cos", list(cos.shape), "= [positions, pairs]")


# %% [markdown]
# ## The score sees the difference
#
# Put the query at position $m$ and the key at position $n$. In each pair the angle between them has
# changed by $m - n$ times the pair's speed, and the score adds the pairs up. So the *places* go in and
# only the *distance* comes out. The curve beside the circle at the top is one pair of this sum.

# %%
def score(query_position, key_position):
    """The dot product of one query and one key, each turned by its own position."""
    query = rotate_by_hand([1, 2, 3, 4, 5, 6, 7, 8], query_position)
    key = rotate_by_hand([8, 7, 6, 5, 4, 3, 2, 1], key_position)
    return sum(a * b for a, b in zip(query, key))


for places in ((6, 4), (7, 4), (7, 5), (1006, 1004)):
    print(f"query at {places[0]:4}, key at {places[1]:4}: score {score(*places):.4f}")

# %% [markdown]
# Two things follow, and the chapter lives on them. A key can be rotated once, when its token
# arrives, and kept: no later token changes the key's own place. And if *one* of the two is turned by
# a wrong number, every score between them is off, for good.

# %% [markdown]
# ## What lands in the cache
#
# In each layer the decoder multiplies the hidden state by the weights, turns Q and K, leaves V
# alone, and only then calls attention, which writes K and V. To see it, we compute K and V of
# layer 0 from the weights ourselves and look into a filled cache.

# %%
from kvlab.cache import ContiguousKVCache
from kvlab.model import rms_norm

cache = ContiguousKVCache(spec, 1, max_len=len(prompt_ids))
first_output = cached_generate(model, prompt_ids, 1, cache=cache)

# %%
layer = model.layers[0]
# each layer first scales its input rows to one size (RMSNorm)
hidden = rms_norm(model.embed_tokens[torch.tensor(prompt_ids)], layer.input_norm, layer.eps)
qkv = torch.nn.functional.linear(hidden, layer.qkv_proj).view(len(prompt_ids), -1, spec.head_dim)
_, key, value = qkv.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)

# %%
cos, sin = model.rope.rows(torch.arange(len(prompt_ids)))
rotated = apply_rope(key, cos, sin)
stored_key, stored_value = (t[0].transpose(0, 1) for t in cache.read(0))  # [s, h_kv, d_h]


def same(a, b):
    return torch.allclose(a, b, atol=1e-4)


print("stored K is the projected K:", same(stored_key, key))
print("stored K is the rotated K:  ", same(stored_key, rotated))
print("stored V is the projected V:", same(stored_value, value))

# %% [markdown]
# That is the name of this chapter. **What is kept is the rotated key.** The position is not stored
# beside it: it is dissolved in the numbers, and the numbers do not show which turn was made. Whoever
# does not know that it was wrong cannot mend it. So it has to be right *before the write*.

# %% [markdown]
# ## Which position is right?
#
# It is the number of tokens before this one in its own sequence. At decode step $t$ after a
# prompt of $p$ tokens, the model is fed one token; together with it there are $s_t = p + t$, and it
# stands at $s_t - 1$, because counting starts at 0.
#
# One popular text says that the position *is* the sequence length. That holds only if the length
# is read before the token is counted. SGLang counts it first, and subtracts. vLLM adds the token's
# place in this forward to the tokens computed before. Both arrive at $s_t - 1$.

# %%
from kvlab.attention import CachedAttention


def decode(prompt_ids, num_outputs, position_of=lambda cached, new: cached + torch.arange(new)):
    """A cached loop whose positions come from outside."""
    cache = ContiguousKVCache(spec, 1, len(prompt_ids) + num_outputs)
    attend, fed, outputs = CachedAttention(spec, cache), list(prompt_ids), []
    while len(outputs) < num_outputs:
        positions = position_of(cache.length, len(fed)).view(1, -1)
        logits = model.forward(torch.tensor([fed]), positions, attend, rows="last")
        cache.advance(len(fed))
        outputs.append(int(logits.argmax()))
        fed = outputs[-1:]
    return outputs


assert decode(prompt_ids, 12) == one[:12]
print("the loop agrees with kvlab's")


# %%
def off_by_one(cached, new):
    right = cached + torch.arange(new)
    return right + 1 if cached else right


def restart(cached, new):
    return torch.arange(new)


def shift_all(cached, new):
    return cached + torch.arange(new) + 5


for position_of in (off_by_one, restart, shift_all):
    text = checkpoint.decode(decode(prompt_ids, 16, position_of))
    print(f"{position_of.__name__:10s}", repr(text))

# %% [markdown]
# Three wrong counters. The second wrecks the text at once. The first is the bug from the top of
# the page. The third moves *every* token, prompt and output alike, and writes the right text. Hold
# on to that one.

# %% [markdown]
# ## The drift laboratory
#
# Reading texts is a poor instrument. A better one: feed the wrong run and the right run the same
# tokens, and compare what each expects next. The distance between two distributions $p$ (right; not
# the prompt here) and $q$ (wrong) is
#
# $$\mathrm{KL}(p \,\|\, q) = \sum_{w} p_w \ln \frac{p_w}{q_w}$$
#
# over all tokens $w$ of the vocabulary, in *nats* (the unit of the natural logarithm). It is 0 if they
# agree, and it tells how much worse the wrong run predicts what the right run would write. First a
# guess.

# %%
from kvlab.faults.drift import shifted_drift
from kvlab.notebook.widgets.practice import Predict

near, far = (shifted_drift(offset, num_steps=32) for offset in (1, 64))
show(
    Predict(
        question="Decode positions are too large by 64 instead of by 1. By how many times does the "
        "mean KL grow?",
        answer=float(f"{far.mean_kl / near.mean_kl:.1g}"),
        unit="times, to one digit",
        explanation="Over the first 32 decode steps of the laboratory's text.",
    )
)

# %%
rows = []
for offset in (1, 4, 16, 64):
    run = shifted_drift(offset, num_steps=32)
    rows.append(
        {
            "moved by": offset,
            "mean KL, nats": f"{run.mean_kl:.1g}",
            "perplexity": f"{run.perplexity:.0f}",
            "right perplexity": f"{run.right_perplexity:.0f}",
            "first differing step": "none" if run.first_differing is None else run.first_differing,
        }
    )
table(rows, "32 decode steps after 64 tokens of text, all layers moved")

# %% [markdown]
# *Perplexity* is how many tokens the model hesitates between, on average, before the one that really
# comes. *First differing step* is where greedy decoding would first choose another token.
#
# Moved by one, this model barely drifts: its scores change, but most of its decisions survive. That
# is what makes the bug so hard to see.

# %% [markdown]
# Below are recorded curves of a longer text: every decode position moved by some offset, in all
# layers or in a single one. Choose, and see where the model is sensitive.

# %%
from kvlab.notebook.widgets.positions import DriftCurves

show(DriftCurves())

# %% [markdown]
# Two things to notice. The drift is largest right behind the prompt and fades. All decoded tokens are
# wrong by the *same* amount, so the distances among them are right; what is wrong is every distance
# across the seam between prompt and output. As the text grows, the model looks across it less.
#
# And no single layer does it alone: each is nearly harmless, and together they add up.

# %% tags=["hide-input"]
from kvlab.notebook.widgets.positions import read_record

record = read_record()
curves = {(c["offset"], c["layer"]): c["kl"] for c in record["curves"]}
early, late = sum(curves[16, None][1:9]) / 8, sum(curves[16, None][-8:]) / 8
layers = {layer: sum(kl) / len(kl) for (offset, layer), kl in curves.items() if offset == 16}
everything = layers.pop(None)
worst = max(layers, key=layers.get)
say(
    f"In the record, moved by 16 in all layers: {early:.2f} nats over the first eight decode steps, "
    f"{late:.4f} over the last eight. Of the {len(layers)} recorded layers, layer {worst} alone does "
    f"the most: {layers[worst]:.4f} nats on average, against {everything:.4f} for all together."
)

# %% [markdown]
# The curves were computed in one forward each. That is allowed, because both runs are fed the same
# tokens, so the keys that a cached loop would have kept are the keys that this forward makes. Let us
# not take it on trust: the cached loop, with the bug switched on, against the one forward.

# %%
from kvlab.faults.drift import cached_logits, shifted_logits, text_ids

ids = text_ids()[:60]
with fault("decode_position_off_by_one"):
    step_by_step = cached_logits(model, ids, prompt_len=40)
at_once = shifted_logits(model, ids, prompt_len=40, offset=1)
agree = float((step_by_step - at_once).abs().max()) < 5e-4
print("the same logits at", len(at_once), "steps:", agree)

# %% [markdown]
# ## The bug that no output shows
#
# Now the third counter, the one that moved everything by five. We ask the laboratory.

# %%
from kvlab.faults.drift import drift

with fault("uniform_shift"):
    shifted = drift()
    shifted_text = cached_generate(model, prompt_ids, 32)

print("mean KL below a millionth:", shifted.mean_kl < 1e-6)
print("the same 32 tokens:", shifted_text == one)


# %% [markdown]
# Scores depend on distances, and no distance has changed. A test that compares outputs passes, and
# would pass forever. (A model that looks its positions up in a learned table, like GPT-2, would
# notice at once.) But the cache now holds other keys than it should. On the day when a
# second part of the system counts from 0 (a prefix cache, a draft model, a scaling rule that looks
# at the length), the two no longer fit.
#
# So do not test outputs only. **Test the positions.**

# %% [markdown]
# ## The detector
#
# Everything needed is at hand in every step: the positions of the tokens that are fed, and
# `seq_lens`, the cached tokens plus the new ones.

# %%
def positions_are_right(positions, seq_len):
    """The last token fed stands at seq_len - 1."""
    return int(positions[-1]) == seq_len - 1


def checked(position_of):
    """The same counter, with the check in front of the model."""

    def counter(cached, new):
        positions = position_of(cached, new)
        assert positions_are_right(positions, cached + new), (
            f"last position {int(positions[-1])}, seq_len {cached + new}"
        )
        return positions

    return counter


# %%
for position_of in (off_by_one, restart, shift_all):
    try:
        decode(prompt_ids, 4, checked(position_of))
    except AssertionError as found:
        print(f"{position_of.__name__:10s} caught: {found}")

assert decode(prompt_ids, 12, checked(lambda cached, new: cached + torch.arange(new))) == one[:12]
print("and the right counter passes")

# %% [markdown]
# All three, at the first wrong step, without looking at a single logit. kvlab has this check as
# `check_positions`, for batches, and `faults.watch()` puts it and the other detectors into every
# forward of whatever runs inside.

# %%
from kvlab import faults

with faults.watch() as placed:
    assert cached_generate(model, prompt_ids, 16) == one[:16]
print("watched for", len(placed), "faults, none found")

# %%
with fault("decode_position_off_by_one"), faults.watch():
    try:
        cached_generate(model, prompt_ids, 16)
    except faults.FaultDetected as found:
        print(found)

# %% [markdown]
# ## Which numbers form a pair?
#
# There are two habits. *Half-split* pairs number $i$ with $i + d_h/2$; most checkpoints in Hugging
# Face format expect it, Llama's among them. *Interleaved* pairs neighbours, as the first paper drew
# it; GPT-J, Cohere and DeepSeek-V3 expect that. Each is fine. Weights trained with one and run with the other give fluent nonsense.

# %%
cos, sin = rope_tables(RopeSpec(theta=10_000.0, rotary_dim=8), torch.tensor([1]))
for name, interleaved in (("half-split", False), ("interleaved", True)):
    turned = apply_rope(x, cos, sin, interleaved=interleaved)[0, 0]
    print(f"{name:12s}", [round(v, 3) for v in turned.tolist()], "length", f"{turned.norm():.4f}")

# %% [markdown]
# The lengths agree, so a test on norms sees nothing. But the two are one rotation in two orders. Sort
# the numbers of Q and of K alike, first the even places and then the odd ones, and each score
# stays what it was. That is how a checkpoint is converted: by sorting rows of $W_q$ and $W_k$.

# %%
from kvlab.rope import interleave_permutation

order = interleave_permutation(8)
sorted_then_half = apply_rope(x[..., order], cos, sin)
inter_then_sorted = apply_rope(x, cos, sin, interleaved=True)[..., order]
print(order.tolist(), same(sorted_then_half, inter_then_sorted))

# %%
with fault("interleaved_for_half_split"):
    print(repr(checkpoint.decode(cached_generate(model, prompt_ids, 12))))

# %% [markdown]
# ## Angles need float32
#
# bfloat16 keeps eight bits of a number. From $2^8$ on it cannot tell a position from the next one, so
# neighbours share an angle. Models run in bfloat16; their angles must not.

# %%
positions = torch.arange(4096)
distinct = positions.to(torch.bfloat16).unique().numel()
print(f"{distinct} different positions left of {len(positions)}")

# %%
exact = (positions.double() * 1.0).cos()  # 1.0 is the speed of the first pair
in_bf16 = positions.to(torch.bfloat16).float().cos()
print(f"worst error of a cosine: {(exact - in_bf16).abs().max():.1f}")

# %% [markdown]
# With an error of that size a cosine says nothing at all. The usual way to get there is innocent: the
# speeds are a buffer of the model, the whole model is cast, and from then on angles are computed in
# bfloat16. Rounding a *finished* cosine is another matter: it loses the last digits and no more.

# %% [markdown]
# ## Long contexts bend the table
#
# A model trained on short texts has never seen its slow pairs turn far. To serve longer ones, most
# families rescale the speeds. Llama 3.1 keeps the fast pairs, divides the slow ones by a factor
# and blends those between. Settings come from `config.json`; read them and *use* them.

# %%
from kvlab.configs import preset
from kvlab.rope import rope_inv_freq

rows = []
for name in ("llama-3.1-8b", "llama-3.2-1b"):
    rope = preset(name).rope
    plain, _ = rope_inv_freq(RopeSpec(rope.theta, rope.rotary_dim))
    scaled, _ = rope_inv_freq(rope)
    factor = dict(rope.params)["factor"]
    kept, divided = int((scaled == plain).sum()), int((scaled == plain / factor).sum())
    rows.append({
        "model": preset(name).name, "pairs": len(plain), "kept": kept,
        "blended": len(plain) - kept - divided, "divided": divided, "factor": factor,
        "slowest pair": f"{plain[-1]:.3e} → {scaled[-1]:.3e}",
    })  # fmt: skip
table(rows, "llama3 scaling: what happens to the pairs", note="Speeds in radians a position.")

# %% [markdown]
# Where `config.json` keeps these settings has changed over the years: the base at the top, the rule
# beside it, both inside `rope_parameters`, one block for each kind of layer. A reader that looks in
# the old place finds nothing and takes a default, which may be off by a factor of a hundred.

# %%
from kvlab.configs import ConfigError, read_config

shape = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4,
    "vocab_size": 1000, "intermediate_size": 512, "rms_norm_eps": 1e-5,
}  # fmt: skip

# %%
old = read_config({**shape, "rope_theta": 500_000.0})
new = read_config({**shape, "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}})
print("old and new place give the same settings:", old.rope == new.rope)
print("nowhere:", read_config(shape).notes[-1])
try:
    read_config({**shape, "rope_theta": 10_000.0, "rope_parameters": {"rope_theta": 500_000.0}})
except ConfigError as error:
    print("twice:  ", error)

# %% [markdown]
# A short prompt cannot tell whether the rule was applied: the slow pairs have hardly moved either
# way. Test the table, not the text. Other rules follow the same idea (linear, dynamic NTK, YaRN, which also
# multiplies cosines and sines by a factor above one, and LongRoPE, with one divisor for each pair).
# Q and K both carry that factor, so a score carries its square: an engine may leave the tables alone and
# put the square into the softmax scale, but must not do both. And a key that is rotated a second time on
# its way into the cache carries the square alone. Only then does its length show the mistake; with a factor
# of one every length stays right. It is one of the bugs below.
#
# Some models turn only a part of each head, and some have two tables:

# %%
rows = []
for name in ("smollm2-135m", "phi-2", "qwen3-next-80b-a3b", "deepseek-v3", "gemma-3-27b", "gpt-2"):
    other_spec = preset(name)
    local = other_spec.rope_local
    layer = next((one for one in other_spec.layers if one.num_kv_heads), other_spec.layers[0])
    rows.append({
        "model": other_spec.name, "head_dim": (layer.expanded or layer).key_dim,
        "rotated": other_spec.rope.rotary_dim,
        "rule": other_spec.rope.rope_type, "base": f"{other_spec.rope.theta:,.0f}",
        "base of sliding layers": f"{local.theta:,.0f}" if local else "the same",
    })  # fmt: skip
table(rows, "Rotary settings of some models", note="GPT-2 learns its positions and turns nothing.")

# %% [markdown]
# ## The table must not change under the cache
#
# LongRoPE has two lists of divisors and switches when the text outgrows the original length. A key
# that was turned by the short list cannot be compared with a query that is turned by the long
# one. kvlab's `RopeTable` refuses to switch behind your back.

# %%
from kvlab.errors import RopeError
from kvlab.rope import RopeTable

settings = {
    "short_factor": (1.0,) * 4, "long_factor": (4.0,) * 4,
    "original_max_position_embeddings": 8, "max_position_embeddings": 32,
}  # fmt: skip
longrope = RopeSpec(10_000.0, 8, "longrope", tuple(sorted(settings.items())))

# %%
short_table = RopeTable(longrope)
short_table.rows(torch.arange(8))
try:
    short_table.rows(torch.tensor([8]))
except RopeError as error:
    print(error)

# %% [markdown]
# ## The other design: keep K as it is
#
# One could also cache the *unrotated* key and turn all of them at every read. Then the position is
# not dissolved in the numbers. Here is that cache, in ten lines around the one we have. (The decoder
# hands over rotated keys; turning one back by its own angle gives the plain key.)

# %%
from kvlab.attention import attention


class RotateOnRead:
    """An `attend` that stores plain K and turns every cached key at each step."""

    def __init__(self, cache):
        self.cache = cache

    def __call__(self, layer, query, key, value):
        start, new = self.cache.length, key.shape[1]
        cos, sin = model.rope.rows(torch.arange(start, start + new))
        self.cache.write(layer, apply_rope(key, cos, -sin), value)
        keys, values = self.cache.read(layer)
        cos, sin = model.rope.rows(torch.arange(keys.shape[2]))
        turned = apply_rope(keys.transpose(1, 2), cos, sin).transpose(1, 2)
        return attention(query, turned, values)


# %%
def run(attend, ids, first_position=0):
    """Feed ids in one forward; the most likely next token."""
    positions = torch.arange(first_position, first_position + len(ids)).view(1, -1)
    logits = model.forward(torch.tensor([ids]), positions, attend, rows="last")
    attend.cache.advance(len(ids))
    return int(logits.argmax())


plain = RotateOnRead(ContiguousKVCache(spec, 1, 64))
tokens = [run(plain, prompt_ids)]
for _ in range(11):
    tokens.append(run(plain, tokens[-1:], plain.cache.length))
print("the same 12 tokens as with rotated keys:", tokens == one[:12])

# %% [markdown]
# What does it cost? Two products and a sum for each number of every cached key, in every step, for
# keys that have been turned before. Attention itself spends two FLOPs on each number of K and two on
# each of V, for every query head. Both grow with the context, so their ratio does not:

# %%
from kvlab import costs
from kvlab.sheet import units

rows = []
for name in ("llama-3-8b", "smollm2-135m", "llama-2-7b"):
    other_spec, s = preset(name), 8192
    turning = costs.key_rotation_flops(other_spec, s)
    attending = costs.attention_flops_cached_step(other_spec, s)
    rows.append({
        "model": other_spec.name, "h / h_kv": other_spec.num_heads // other_spec.num_kv_heads,
        "turning all keys": units.flops(turning), "attention": units.flops(attending),
        "turning / attention": f"{turning / attending:.0%}",
    })  # fmt: skip
table(rows, f"One cached step at s = {s:,}, all layers")

# %% tags=["nbval-ignore-output"]
# A clock: yours will differ.
from kvlab.notebook.measure import in_turns, medians

query = torch.randn(1, 1, spec.num_heads, spec.head_dim)
keys, values = torch.randn(2, 1, spec.num_kv_heads, 2048, spec.head_dim)
cos, sin = model.rope.rows(torch.arange(2048))


def turn_and_attend():
    return attention(query, apply_rope(keys.transpose(1, 2), cos, sin).transpose(1, 2), values)


calls = {"on read": turn_and_attend, "stored": lambda: attention(query, keys, values)}
clock = medians(in_turns(calls, rounds=30))
print(f"one layer's attention at 2048 tokens takes {clock['on read'] / clock['stored']:.1f} x as long")


# %% [markdown]
# In time it is worse than in FLOPs: here each product and each sum is an operation of its own that reads
# and writes memory, and the turned K is a second copy. A fused kernel would avoid the copy and keep
# the arithmetic. For that price the position becomes free again. The same passage at another place,
# with nothing before it here or there, has the same plain keys:

# %%
def keys_at(first_position):
    """K of every layer as cached, [s, h_kv, d_h], when the prompt stands at first_position."""
    attend = CachedAttention(spec, ContiguousKVCache(spec, 1, 64))
    run(attend, prompt_ids, first_position)
    return [attend.cache.read(i)[0][0].transpose(0, 1) for i in range(spec.num_layers)]


def turned_back(keys, first_position):
    cos, sin = model.rope.rows(torch.arange(first_position, first_position + len(prompt_ids)))
    return [apply_rope(key, cos, -sin) for key in keys]


# %%
def layers_equal(a, b):
    return sum(torch.allclose(x, y, atol=1e-2) for x, y in zip(a, b))


first, later = keys_at(0), keys_at(7)
plain_first, plain_later = turned_back(first, 0), turned_back(later, 7)
print("layers whose rotated K is the same at another place:", layers_equal(first, later))
print("layers whose plain K is the same at another place:  ", layers_equal(plain_first, plain_later))

# %% [markdown]
# This is what the other design is for: dropping tokens from the front and closing the gap, moving a
# cached passage, changing a scaling rule in the middle of a text. Position is all that this frees. K and
# V of every layer but the first were made from what stood before them (chapter 2), so a passage behind
# another text, or without its beginning, keeps rows that a fresh forward would not make. Engines that
# shift a context accept that. One can also have it both ways.
# Rotations add up, so a key turned by 7 becomes a key turned by 3 if it is turned by −4 more:
# rare moves are paid for when they happen, and reads stay free. The engines that shift contexts
# do that.

# %% [markdown]
# ## Left padding
#
# Prompts of different lengths fit into one rectangle if the short ones are padded on the left. Then
# column and position are no longer the same thing: each row counts its own real tokens.

# %%
from kvlab.generate import left_pad, padded_generate
from kvlab.rope import next_positions, padded_positions

short = checkpoint.encode("Two plus two is")
token_ids, mask = left_pad([short, prompt_ids])
rows = [
    {"row": i, "mask": "".join(map(str, m)), "positions": " ".join(map(str, p)), "next": int(n)}
    for i, (m, p, n) in enumerate(
        zip(mask.tolist(), padded_positions(mask).tolist(), next_positions(mask))
    )
]
table(rows, "A batch of two prompts", note="Positions under a 0 of the mask mean nothing.")

# %%
alone = [cached_generate(model, ids, 10) for ids in (short, prompt_ids)]
batched = padded_generate(model, [short, prompt_ids], 10)
print("each row as if alone:", batched == alone)

# %%
with fault("shared_counter_under_padding"):
    wrong = padded_generate(model, [short, prompt_ids], 10)
for name, right_row, wrong_row in zip(("short", "long"), alone, wrong):
    print(f"{name:5s}", "right:", repr(checkpoint.decode(right_row)))
    print(f"{name:5s}", "wrong:", repr(checkpoint.decode(wrong_row)))

# %% [markdown]
# With one counter for all rows, the shorter prompt jumps by the width of its padding between its
# last prompt token and its first output. The longest row is right, and so is every batch of equal
# lengths: the two cases that people test.

# %% [markdown]
# ## All bugs of this chapter
#
# Each row below is a bug that somebody reported. Its detector runs twice on a tiny model: with the
# bug switched on, and without. In your own notebook, `with fault("name"):` switches one on.

# %%
rows = []
for entry in faults.all_faults():
    if entry.layer != "position" and entry.name != "write_before_rotate":
        continue
    entry.detect()  # silent
    try:
        with fault(entry.name):
            entry.detect()
        caught = "no"
    except faults.FaultDetected:
        caught = "yes"
    rows.append({"fault": entry.name, "caught": caught, "by": entry.detector})
table(rows, "Faults of positions and rotation", text=True)

# %% [markdown]
# The [field guide](../book/bugs.md) has the rest of each entry: symptom, smallest input, cure, and
# who hit it.

# %% [markdown]
# ## Exercises
#
# As a page: the [exercises page](../book/progress.md) checks your answers in the browser.
#
# **4.1** The running example: a prompt of 2,048 tokens, then 512 decode forwards. Which position
# does the token have that the last one feeds?

# %%
from kvlab.notebook.exercises import check, hint, status

answer = None  # your answer here
check("4.1", answer)


# %% [markdown]
# <details><summary>Solution of 4.1</summary>
#
# `2048 + 512 - 1`: seq_len is `2048 + 512`, and the position is one less.
#
# </details>
#
# **4.2** Write the detector for a batch. `positions` has one list per request, the positions of the
# tokens that it feeds; `seq_lens` has one number per request. An idle row has `seq_len` 0 and
# position 0.

# %%
def positions_ok(positions, seq_lens):
    return None  # your code here


check("4.2", positions_ok)


# %% [markdown]
# <details><summary>Solution of 4.2</summary>
#
# ```python
# def positions_ok(positions, seq_lens):
#     return all(row[-1] == max(n - 1, 0) for row, n in zip(positions, seq_lens))
# ```
#
# </details>
#
# **4.3** Write the half-split rotation of a list without looking up. Pair $i$ turns by `position *
# theta ** (-2 * i / d)`.

# %%
def rotate(x, position, theta):
    return None  # your code here


check("4.3", rotate)


# %% [markdown]
# <details><summary>Solution of 4.3</summary>
#
# `rotate_by_hand`, at the top of this chapter.
#
# </details>
#
# **4.4** A left-padded batch: at which position does each row go on?

# %%
def next_of(mask):
    return None  # your code here


check("4.4", next_of)

# %% [markdown]
# <details><summary>Solution of 4.4</summary>
#
# ```python
# def next_of(mask):
#     return [sum(row) for row in mask]
# ```
#
# </details>
#
# **4.5** SmolLM2-135M with unrotated keys: how many FLOPs does one step at $s$ = 2,048 spend on
# turning the keys of all layers?

# %%
answer = None  # your answer here
check("4.5", answer)

# %% [markdown]
# <details><summary>Solution of 4.5</summary>
#
# `costs.key_rotation_flops(spec, 2048)`: three FLOPs for each number of K, that is `3 * 30 * 3 * 64
# * 2048`.
#
# </details>

# %%
status(4)

# %% [markdown]
# ## In the engines
#
# The order is the same everywhere. In vLLM's `vllm/model_executor/models/llama.py` (at commit
# `0035bdf`) an attention layer splits Q, K and V, calls `rotary_emb(positions, q, k)`, and hands all
# three to `attn`, which writes the cache. The table is built in float32 and cast afterwards
# (`RotaryEmbedding._compute_cos_sin_cache` in `rotary_embedding/base.py` at `04458da`);
# `is_neox_style` is the name for half-split. For LongRoPE the table is chosen once, from the longest
# length that the server accepts, with a comment that says why: the cached keys
# (`phi3_long_rope_scaled_rope.py` at `17d618b`).
#
# SGLang computes a decode position as `clamp_position(seq_lens)`, which is `seq_lens - 1` but never
# negative (`python/sglang/srt/model_executor/forward_batch_info.py` at commit `271a25b`). The clamp is
# for idle rows of a padded batch. A prompt's positions start at its prefix length, the tokens that
# were found in the cache.
#
# llama.cpp keeps rotated keys too, and turns them once more when a context is shifted
# (pull request 3228).

# %% [markdown]
# ## What it cost, what comes next
#
# You have a cache of keys that carry their places within themselves, a laboratory that measures what
# a wrong place does, one mistake that it cannot measure, and a check that finds both.

# %% tags=["hide-input"]
llama = preset("llama-3-8b")
per_step = costs.key_rotation_flops(llama, 1)
on_each_read = costs.key_rotation_flops(llama, 2560)
say(
    f"**What it cost**: {len(rows)} bugs of this chapter that raise nothing, each of them caught. And a "
    f"wrong position stays: moved by 16, the recorded run is off by {everything:.4f} nats a token, and "
    f"no cached key can be mended without turning it again.",
    f"**What it made possible**: a key is turned once, when it is written. In {llama.name} that is "
    f"{units.flops(per_step)} a decode step in all layers; keys turned at every read would cost "
    f"{units.flops(on_each_read)} in the last step of the running example, at s = 2,560.",
)

# %% [markdown]
# So far a sequence lives in one long piece of memory, reserved to its largest size.
# [Chapter 5](05_paged_blocks.ipynb) cuts that piece into blocks. Positions stay what they are; only
# the place in memory moves.
#
# **References.** RoPE is by Su et al. 2021, *RoFormer*. YaRN is by Peng et al. 2023. The public
# reports behind the faults are listed in the [field guide](../book/bugs.md); all references of the
# book are on the [references page](../book/references.md).
