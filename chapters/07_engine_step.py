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
# # 7. The engine step
#
# [**Open in Colab**](https://colab.research.google.com/github/OWNER/kvlab/blob/main/chapters/07_engine_step.ipynb)
#
# **Many people talk to one model. What happens between two tokens?**
#
# You build the loop that serves them all: schedule, prepare, execute, sample, update, and around
# again. Prefill and decode turn out to be one thing, requests of any length share one forward, and
# none of them can tell that it was not alone.
#
# You need [chapter 2](02_cache_append.ipynb) for the cache, and
# [chapter 5](05_paged_blocks.ipynb) for blocks, tables and slots.

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
# ## An engine at work
#
# Each row is a request, each column one step, and the number in a cell says how many tokens of that
# request ran in that step. Violet cells read a prompt, olive ones write a token, an empty dashed cell
# waits, and × gave its memory back. Step through it, and watch request D.

# %%
from kvlab.notebook.widgets import show
from kvlab.notebook.widgets.scenes import Steps

show(Steps("small_pool"))


# %% [markdown]
# Three things in this picture have no counterpart in a loop over one text. Prompts come in pieces,
# beside tokens of others. Request C starts in its middle, since its first blocks were there
# already. And D is thrown out once, as E is later: there was no memory for it. Both come back cheaply:
# nobody had written over their blocks yet, so K and V were found there and nothing was computed twice.
# That is luck, as *When memory runs out* shows. The rest of this chapter builds what makes these
# decisions, from the top.

# %% [markdown]
# ## One subtraction
#
# The engine keeps two numbers for each request: how many of its tokens are **known** (the prompt,
# and every output so far) and how many are **computed** (their K and V are in the cache). What is
# left to do is the difference. There is no prefill mode and no decode mode.

# %%
def new_tokens(known, computed):
    """How many tokens of a request could run now."""
    return known - computed


print("a new prompt of 5:       ", new_tokens(known=5, computed=0))
print("the same, 3 are cached:  ", new_tokens(known=5, computed=3))
print("decoding, 7 outputs:     ", new_tokens(known=5 + 7, computed=5 + 6))
print("decoding with 3 drafts:  ", new_tokens(known=5 + 7 + 3, computed=5 + 6))

# %% [markdown]
# Look at the third line. A decoding request always has exactly one token more known than computed:
# the newest one was sampled and has not been fed. Count it as computed and every later position is
# one too far. Engines had this bug, and we switch it on below. (A *draft* is a guessed token, see *Guess
# ahead*.)
#
# Then the difference is cut, in this order: a **threshold** keeps one long prompt from filling a
# step, the **budget** bounds the tokens of the whole step, and the free **blocks** bound what can
# be stored. With chunking switched off a prompt runs whole or not at all.

# %%
from kvlab.scheduler import clamp_new_tokens, num_new_tokens

for new, threshold, budget, chunked in (
    (5000, 2048, 8192, True),
    (5000, 2048, 1000, True),
    (5000, 0, 8192, True),
    (5000, 2048, 8192, False),
    (5000, 0, 1000, False),
    (0, 0, 1000, True),
):
    share, reason = clamp_new_tokens(new, threshold, budget, chunked)
    print(f"{new:5} new, threshold {threshold:4}, budget {budget:4}, chunked {chunked!s:5} -> "
          f"{share:4}  {reason or 'all of it'}")

# %%
assert all(
    num_new_tokens(known, 0, computed) == new_tokens(known, computed)
    for known in range(50) for computed in range(50)
)
print("our subtraction is kvlab's (its middle argument is 0 where each step waits for the one before)")


# %% [markdown]
# ## A scheduler in fifteen lines
#
# Two queues. Those who run are served first, so that nobody who has started is starved by somebody
# who has not. Then those who wait come in, in the order of arrival, until the budget is spent.
# With memory for all, that is the whole of it.

# %%
def schedule_by_hand(running, waiting, computed, known, budget):
    """{request: tokens} for one step; moves requests from waiting to running."""
    shares = {}
    for request in list(running):
        share = min(known[request] - computed[request], budget)
        if share:
            shares[request], budget = share, budget - share
    while waiting and budget:
        request = waiting.pop(0)
        running.append(request)
        share = min(known[request] - computed[request], budget)
        shares[request], budget = share, budget - share
    return shares


# %%
def run_by_hand(prompts, outputs, budget):
    """The shares of every step until all requests have their outputs."""
    known = dict(prompts)
    computed = dict.fromkeys(prompts, 0)
    running, waiting, steps = [], list(prompts), []
    while running or waiting:
        shares = schedule_by_hand(running, waiting, computed, known, budget)
        steps.append(shares)
        for request, share in shares.items():
            computed[request] += share
            if computed[request] == known[request]:  # the last token ran: sample one
                known[request] += 1
                if known[request] == prompts[request] + outputs:
                    running.remove(request)
    return steps


by_hand = run_by_hand({"A": 14, "B": 6, "C": 12}, outputs=5, budget=12)
for number, shares in enumerate(by_hand):
    print(number, shares)

# %% [markdown]
# Now kvlab's `Scheduler` on the same three prompts. It stands on a pool of blocks and answers each
# step with a `Schedule`: who got how many tokens, and why the others did not.

# %%
from kvlab.blocks import BlockPool
from kvlab.request import Request
from kvlab.scheduler import Scheduler, SchedulerConfig
from kvlab.tables import BlockManager


def make_scheduler(num_blocks=64, block_size=4, **settings):
    manager = BlockManager(BlockPool(num_blocks, block_size), prefix_caching=False)
    return Scheduler(manager, SchedulerConfig(**settings))


scheduler = make_scheduler(max_num_batched_tokens=12)  # the budget, by vLLM's name
for name, length in (("A", 14), ("B", 6), ("C", 12)):
    scheduler.add(Request(name, list(range(length)), max_new_tokens=5))

# %%
steps = []
while scheduler.has_requests:
    schedule = scheduler.schedule()
    steps.append({entry.request_id: entry.num_tokens for entry in schedule.scheduled})
    sampled = {entry.request_id: [0] for entry in schedule.scheduled if entry.samples}
    scheduler.update(schedule, sampled)

assert steps == by_hand
print(len(steps), "steps, the same shares as ours in each")

# %% [markdown]
# ## The ragged batch
#
# One forward takes all shares at once. Their tokens are laid in one row, `[num_tokens]`, with no
# padding, and beside it stand the lists that say whose token a row is and where. Take three
# requests with 2, 5 and 3 tokens scheduled, of which 10, 0 and 7 came before.

# %%
scheduled, computed = [2, 5, 3], [10, 0, 7]

req_indices = [r for r, n in enumerate(scheduled) for _ in range(n)]
query_pos = [i for n in scheduled for i in range(n)]
positions = [computed[r] + i for r, i in zip(req_indices, query_pos)]
query_start_loc = [0, 2, 2 + 5, 2 + 5 + 3]
seq_lens = [done + n for done, n in zip(computed, scheduled)]

for name in ("req_indices", "query_pos", "positions", "query_start_loc", "seq_lens"):
    print(f"{name:16}", globals()[name])

# %%
from kvlab import batch

assert req_indices == batch.request_indices(scheduled)
assert query_pos == batch.query_positions(scheduled)
assert positions == batch.token_positions(computed, scheduled)
assert query_start_loc == [0, *batch.cumulative(scheduled)]
assert seq_lens == batch.context_lengths(computed, scheduled)
print("cumulative:", batch.cumulative(scheduled), "- all five are kvlab's")

# %% [markdown]
# `query_start_loc` and `seq_lens` look alike on a fresh prompt, and people have mixed them up. The
# first counts rows of *this step*; the second counts the *context*, everything that attention
# reads. A decoding request has one row and a context of thousands.
#
# The model itself needs only token ids and positions. Every weight is read once for all rows. Only
# attention asks who is who, and for the write each row has its **slot**, by the rule of chapter 5.

# %%
print(batch.slots([9, 10], [0, 0], block_tables=[[5, 2, 7]], block_size=4),
      "= table[position // 4] * 4 + position % 4")

# %% [markdown]
# Engines give names to what the query lengths already say: a step of prompts is an EXTEND, a step
# where each request has one row a DECODE, a step with both MIXED, and no request at all IDLE.
# A *captured graph* is a step's kernel launches, recorded once and replayed as one, for fixed shapes.
# Where it needs more rows than there are, the padding is rows at position 0 with slot −1, which the
# cache skips.

# %%
for counts in ([2, 5, 3], [1, 1, 1], [1, 5], []):
    print(f"{counts!s:12}", batch.forward_mode(counts).name)

# %% [markdown]
# ## Step 512 of the running example
#
# The book's running example is one request: a prompt of 2,048 tokens, then 512 decode forwards. No
# model is needed to know what the last of them looks like. We let the scheduler run on the real
# counts, and look at the batch of the 512th.

# %%
example = make_scheduler(num_blocks=161, block_size=16, max_num_batched_tokens=2048)
example.add(Request("running example", [0] * 2048, max_new_tokens=513))
example.update(example.schedule(), {"running example": [0]})  # prefill samples the first output

for t in range(1, 513):
    schedule = example.schedule()
    last = batch.build_batch(schedule)
    example.update(schedule, {"running example": [0]})

print("t =", t, "| positions", last.positions, "| seq_lens", last.seq_lens,
      "| query_start_loc", last.query_start_loc, "|", last.mode.name)

# %%
assert (last.positions, last.seq_lens) == ([2559], [2560])
assert last.positions[-1] == last.seq_lens[-1] - 1
print("position = seq_len - 1, here and in every other step")

# %% [markdown]
# The context $s_t = p + t$ counts the token that is being fed. So its position is one less. A
# sentence such as "the decode position is simply the sequence length" is wrong by one, and chapter
# 4 shows what that costs. `Batch.check()` compares the two; kvlab's tests call it for every batch.

# %% [markdown]
# ## The loop, on a real model
#
# Five calls make a step. Everything in them is known by now: the paged cache of chapter 5 is what
# the runner writes into and reads from.

# %%
import torch

from kvlab.checkpoint import load
from kvlab.engine import ModelRunner

checkpoint = load(dtype=torch.float32)  # on the GPU if there is one; exact enough to compare
model = checkpoint.model
print(checkpoint.source)
texts = ("The capital of France is", "One, two, three, four,", "Water boils at")
prompts = [checkpoint.encode(text) for text in texts]

# %% tags=["nbval-ignore-output"]
# Depends on the machine: yours may differ.
from kvlab.notebook.measure import runtime

print(runtime(model))

# %%
scheduler = make_scheduler(num_blocks=65, block_size=16, max_num_batched_tokens=8)
runner = ModelRunner(model, num_blocks=65, block_size=16)
requests = [Request(text, ids, max_new_tokens=10) for text, ids in zip(texts, prompts)]
for request in requests:
    scheduler.add(request)

while scheduler.has_requests:
    schedule = scheduler.schedule()                                # 1. who runs how many tokens
    ragged = batch.build_batch(schedule)                           # 2. prepare the inputs
    logits = runner.run(ragged)                                    # 3. execute
    rows = iter(logits.argmax(-1).tolist())                        # 4. sample, greedily
    sampled = {e.request_id: [next(rows)] for e in schedule.scheduled if e.samples}
    scheduler.update(schedule, sampled)                            # 5. take the results

# %%
from kvlab.generate import cached_generate

for request in requests:
    print(repr(request.request_id + checkpoint.decode(request.output_token_ids)))
alone = [cached_generate(model, ids, 10) for ids in prompts]
assert [request.output_token_ids for request in requests] == alone
print("each one is what it would have been alone")

# %% [markdown]
# In float32 that holds here token for token. In 16 bits a batch of another size may sum in another
# order, and a near-tie (chapter 2) can fall the other way. Engines therefore do not promise it; vLLM
# has a slower mode that does, `VLLM_BATCH_INVARIANT`.

# %% [markdown]
# `Engine` is this loop with the edges filed off: end of sequence, sampling with a seed per request,
# streaming, times, and a hook, `on_step`, that is told what each step did. First a guess. We give it sixteen prompts and ask for
# twelve outputs each; a loop over single requests would need a forward per output.

# %%
from kvlab.engine import Engine
from kvlab.notebook.widgets.practice import Predict

many = [checkpoint.encode(f"Question {i}: what is {i} plus {i}? Answer:") for i in range(16)]
steps = []  # what each step did
engine = Engine(model, num_blocks=257, prefix_caching=False, on_step=steps.append)
together = engine.generate(many, max_new_tokens=12)
forwards = len(steps)

show(Predict(
    question="Sixteen short prompts, twelve outputs each: how many forwards does the engine run?",
    answer=forwards,
    unit="forwards",
    explanation="All prompts fit the budget of one step, and then each step serves all sixteen.",
))

# %%
from kvlab.notebook.display import table

assert [o.token_ids for o in together[:4]] == [cached_generate(model, ids, 12) for ids in many[:4]]
table(
    [
        {"step": s.schedule.step, "mode": s.batch.mode.name, "requests": s.batch.num_reqs,
         "tokens": s.batch.num_actual_tokens, "longest context": s.batch.max_seq_len}
        for s in (steps[0], steps[1], steps[-1])
    ],
    "First, second and last step: one prefill for all, then decodes for all",
)

# %% [markdown]
# ## When memory runs out
#
# A request's cache grows with every token, and nobody knows beforehand how long an answer gets. So
# an engine admits more than fits, and when a running request needs a block and none is free, the
# **youngest** gives its blocks back. It keeps its outputs and its place in the line, and when it
# comes in again its whole text is one prefill: preemption by recompute.

# %%
tight = Engine(model, num_blocks=12, block_size=8, prefix_caching=False)
squeezed = tight.generate(many[:6], max_new_tokens=12)
assert [o.token_ids for o in squeezed] == [o.token_ids for o in together[:6]]
stats = tight.scheduler.stats
print(f"{stats.num_steps} steps, {stats.num_preemptions} preemptions, "
      f"{stats.num_recomputed_tokens} tokens computed again - and not one output differs")

# %% [markdown]
# Why the youngest? Because then the oldest can always take what it needs, so it always moves; the
# next one becomes the oldest, and so everybody gets served in the end. Order by anything that a
# preemption changes, and a request can be thrown out for ever.
#
# With prefix caching on, the blocks that were given back are still there until somebody writes over
# them. A request that returns soon finds them, and pays little. Those tokens are not counted as
# prefix *hits*, or the hit rate would rise with the trouble.

# %%
kept = Engine(model, num_blocks=12, block_size=8)
kept.generate(many[:6], max_new_tokens=12)
after = kept.scheduler.stats
print(f"dropped {after.num_dropped_tokens}, found again {after.num_resumed_tokens}, "
      f"computed again {after.num_recomputed_tokens}, cross-request hits "
      f"{after.num_cached_tokens}")

# %% [markdown]
# What can never fit is refused when it arrives, with a reason. Otherwise it would stand at the head
# of the line for ever, and everybody behind it too.

# %%
from kvlab.errors import RequestError

try:
    tight.add_request([1] * 130, max_new_tokens=8)
except RequestError as error:
    print("refused:", error)

# %% [markdown]
# ## Two ways to open the door
#
# May a long prompt start as soon as its first chunk fits, or only when all of it does? The first
# rule starts earlier and can run out half way: then what it has computed is dropped, and it tries
# again. The second waits. Both are one setting, and the difference is counted in tokens.

# %%
from kvlab.notebook.simulation import WORKLOADS, simulate

load_first = WORKLOADS["first_chunk"]


def compare(workload, **settings):
    """Totals of a workload under one policy; the scheduler is real, the tokens are made up."""
    settings = {**workload.settings, **settings}
    return simulate(workload.arrivals, settings, num_blocks=workload.num_blocks,
                    block_size=workload.block_size, prefix_caching=workload.prefix_caching)


# %%
rows = []
for policy in ("first_chunk", "full_length"):
    result = compare(load_first, admission=policy)
    late = next(r for r in result["requests"] if r["id"] == "D")
    rows.append({
        "admission": policy,
        "steps in all": result["totals"]["num_steps"],
        "preemptions": result["totals"]["num_preemptions"],
        "tokens dropped": result["totals"]["num_dropped_tokens"],
        "D: thrown out": late["preemptions"],
        "D: steps to first token": late["first_step"] - late["added_step"] + 1,
    })
table(rows, "The long prompt D arrives while three others run in a small pool")

# %% [markdown]
# D gets its first token at the same step under both rules. Coming in early bought it nothing here,
# and cost the machine work that was thrown away. Full-length admission counts the tokens that are
# known; it cannot know how long the answers get, so a preemption remains.
#
# The second question of the door: if the first in line does not fit, may lighter ones pass it?
# Strict order leaves memory idle. Passing fills it, and may keep the heavy one waiting, if those who
# passed still hold blocks when its turn comes. kvlab bounds how often, so that nobody waits for ever.

# %%
rows = []
for rule in ("strict", "skip"):
    result = compare(WORKLOADS["head_of_line"], head_of_line=rule)
    waits = {r["id"]: r["first_step"] - r["added_step"] for r in result["requests"]}
    heavy = next(r for r in result["requests"] if r["id"] == "heavy")
    rows.append({
        "head of line": rule,
        "heavy: steps at the head": heavy["head_delay"],
        "heavy: passed by": heavy["skips"],
        "the light ones wait": ", ".join(f"{waits[name]}" for name in "BCD"),
    })
table(rows, "A heavy request arrives before three light ones (waits in steps)")

# %% [markdown]
# Here passing cost the heavy one nothing: it waits for A's blocks, and the light ones were done before
# A was.

# %% [markdown]
# And the threshold: it keeps a long prompt from taking every step's budget while others only want
# a token. Here a long prompt arrives one step before a short one.

# %%
for threshold in (0, 8):
    result = compare(WORKLOADS["long_prompt"], long_prefill_token_threshold=threshold)
    wait = {r["id"]: r["first_step"] - r["added_step"] + 1 for r in result["requests"]}
    print(f"threshold {threshold}: steps to the first token, long {wait['long']}, short {wait['C']}")

# %% [markdown]
# ## Throughput against latency
#
# A decode step reads every weight, whether for one request or for sixteen. So batching multiplies
# the tokens per second of the machine. It does nothing for the speed of one stream: each request
# still gets one token a step, and the step only gets longer. Commit to a guess: how many times the
# tokens per second at batch 16, against batch 1, on your machine?

# %%
from kvlab.notebook.exercises import outcome, predict

predict("batch 16 / batch 1, tokens per second", 8)


# %%
def measure(batch_size, outputs=9):
    """Seconds to the first token, and per output token, with this many requests at once."""
    engine = Engine(model, num_blocks=257, prefix_caching=False, max_num_batched_tokens=1024)
    results = engine.generate(many[:batch_size], outputs)
    return results[0].ttft_seconds, results[0].time_per_output_token_seconds


measure(2, 3)  # warm up
sizes = (1, 2, 4, 8, 16)
times = {size: measure(size) for size in sizes}
throughput = {size: size / times[size][1] for size in sizes}

# %% tags=["nbval-ignore-output"]
# A clock: yours will differ.
table(
    [
        {"batch": size, "time to first token, ms": f"{1e3 * first:.0f}",
         "time per output token, ms": f"{1e3 * each:.0f}",
         "tokens per second, all together": f"{throughput[size]:.0f}",
         "one stream": f"{1 / each:.1f}"}
        for size, (first, each) in times.items()
    ],
    f"Measured here, float32, prompts of up to {max(map(len, many))} tokens",
)
outcome("batch 16 / batch 1, tokens per second", throughput[16] / throughput[1])

# %% tags=["nbval-ignore-output", "hide-input"]
# A clock: yours will differ.
from kvlab.notebook.display import figure

figure(
    {
        "all together": (list(sizes), list(throughput.values())),
        "one stream": (list(sizes), [1 / each for _, each in times.values()]),
        "if only reading weights took time": (list(sizes), [size * throughput[1] for size in sizes]),
    },
    x="requests in the batch", y="tokens per second", log_x=True, log_y=True,
    title="Batching raises throughput, and not the speed of one stream",
    alt="Tokens per second over batch size: the total rises, a single stream falls",
    colours={"all together": "one", "one stream": "two", "if only reading weights took time": "weights"},
)

# %% [markdown]
# The total rises, more slowly than the batch: on a CPU the arithmetic of sixteen rows is no longer
# free, and attention is not shared at all, since each request reads its own K and V. The single
# stream falls. The time to first token grows too, because all prompts stand in the same step. This
# trade is what the budget and `max_num_seqs`, the most requests that run at once, set; there is no setting that wins at both.

# %% [markdown]
# ## Guess ahead
#
# If one row costs as much as four, feed four: the newest token and three guesses for what follows.
# The step's logits then say what the model would have sampled after each of them. Guesses that
# agree are kept, the first that does not is replaced by the model's own token, and all behind it is
# undone. Here the guess is whatever followed the same few tokens earlier in the text.

# %%
from kvlab.sampling import NgramProposer, accept, rollback
from kvlab.scheduler import computed_after

proposer = NgramProposer(num_drafts=3)
print("proposed:", proposer.propose([7, 8, 9, 5, 7, 8]))
print("drafts 4 5 6, the model says 4 5 9 1 -> keep", accept([4, 5, 6], [4, 5, 9, 1]))
for outputs in (4, 2, 1):
    print(f"11 tokens known, 10 computed, 3 drafts, {outputs} outputs -> computed",
          computed_after(10, 3, outputs))

# %% [markdown]
# The counters are where this goes wrong in practice. The step counts all its rows as computed, then takes
# those of rejected drafts back. The newest output has not been fed, so one token is always left to go.
#
# Guesses may also come from a second, smaller *draft model*, with a cache of its own; the large one is
# then the *target*. The target was fed all guesses and drops the wrong ones. The draft model never read
# its last guess, so it drops one fewer. If all were right it drops none, and must still read that guess:
# one forward more. With 4 guesses of which 2 were right:

# %%
print(rollback(4, 2))
print("all four right:", rollback(4, 4))

# %%
listing = [checkpoint.encode("1 apple, 2 apples, 3 apples, 4 apples, 5 apples, 6 apples,")]
plain = Engine(model, num_blocks=65)
guessing = Engine(model, num_blocks=65, proposer=proposer)
without, with_drafts = plain.generate(listing, 24), guessing.generate(listing, 24)

assert with_drafts[0].token_ids == without[0].token_ids
few, many_steps = (e.scheduler.stats.num_steps for e in (guessing, plain))
print(f"forwards: {many_steps} without, {few} with; "
      f"{with_drafts[0].num_accepted_tokens} of {with_drafts[0].num_draft_tokens} guesses right")

# %% [markdown]
# ## The bugs of this chapter
#
# None of these raises an error by itself. Each is switched on below in a small crowded engine, its
# symptom is measured, and then the detector stands beside it: `kvlab.integrity` around every step,
# and `Batch.check()` on every batch. The
# [field guide](../book/bugs.md) has them all.

# %%
from kvlab import faults

shown = ("sampled_token_counted_as_computed", "context_is_query_length", "preemption_loses_outputs",
         "budget_not_spent")
for name in shown:
    entry = faults.get(name)
    quiet = entry.measure()
    with faults.fault(name):
        loud = entry.measure()
    print(f"{name}\n    {entry.unit}: {quiet:.2f} without, {loud:.2f} with")

# %%
for name in shown:
    with faults.fault(name):
        try:
            faults.get(name).detect()
        except faults.FaultDetected as caught:
            print(f"{name}: caught\n    {caught}")

# %% tags=["hide-input"]
table(
    [
        {"fault": entry.name, "symptom": entry.symptom}
        for entry in faults.all_faults() if entry.layer == "scheduler"
    ],
    "All faults of the engine step",
)

# %% [markdown]
# ## Exercises
#
# As a page: the [exercises page](../book/progress.md) checks your answers in the browser.
#
# **7.1** Write `share(num_tokens, num_drafts, num_computed, threshold, budget, chunked)`: how many
# tokens of a request run in this step? Predict first: what should it say for a request whose tokens
# are all computed? (`hint("7.1")` gives a push.)

# %%
from kvlab.notebook.exercises import check, hint

share = None  # your answer here
check("7.1", share)

# %% [markdown]
# <details><summary>Solution of 7.1</summary>
#
# ```python
# def share(num_tokens, num_drafts, num_computed, threshold, budget, chunked):
#     new = max(num_tokens + num_drafts - num_computed, 0)
#     if not chunked:
#         return new if new <= budget else 0
#     return min(new, threshold or new, budget)
# ```
#
# </details>
#
# **7.2** Three requests have `[9, 0, 6]` tokens computed and `[1, 4, 2]` scheduled. Give a dict of
# `req_indices`, `positions`, `query_start_loc` and `seq_lens`. Predict first: how many rows?

# %%
arrays = None  # your answer here
check("7.2", arrays)

# %% [markdown]
# <details><summary>Solution of 7.2</summary>
#
# ```python
# arrays = {
#     "req_indices": [0, 1, 1, 1, 1, 2, 2],
#     "positions": [9, 0, 1, 2, 3, 6, 7],
#     "query_start_loc": [0, 1, 5, 7],
#     "seq_lens": [10, 4, 8],
# }
# ```
#
# </details>
#
# **7.3** A request has eleven tokens, ten of them computed, and three drafts. The first draft is
# right, the second is not. Predict `(num_computed_tokens, num_tokens)` after the step.

# %%
after_the_step = None  # your answer here
check("7.3", after_the_step)

# %% [markdown]
# <details><summary>Solution of 7.3</summary>
#
# Two new tokens: the accepted draft and the model's own next one, so 13 are known. The 11th token
# and the accepted draft were fed and are right, so 12 are computed: `(12, 13)`.
#
# </details>
#
# **7.4** A request with a prompt of 30 has sampled 12 outputs when it is preempted. No prefix
# caching. Predict `(tokens of its prefill when it comes back, tokens computed a second time)`.

# %%
bill = None  # your answer here
check("7.4", bill)

# %% [markdown]
# <details><summary>Solution of 7.4</summary>
#
# Prompt and outputs are known tokens, and all but the newest had been computed: `(42, 41)`.
#
# </details>

# %% [markdown]
# ## In the engines
#
# **vLLM** writes the subtraction almost as we did, with drafts and placeholders (outputs of a step that
# still runs), in `Scheduler.schedule`, `vllm/v1/core/sched/scheduler.py` (lines 566 to 575 at `a556f3f`), and clamps
# it by `long_prefill_token_threshold` and the token budget. Its request has the same two counters,
# `num_tokens_with_spec` and `num_computed_tokens`. Positions are made in two runners, in
# `v1/worker/gpu_model_runner.py` (L4287 to L4291) and `v1/worker/gpu/model_runner.py` (L1416 to
# L1424). `EngineCore.step` is the loop.
#
# **SGLang** names the step: `ForwardMode` is EXTEND, DECODE, MIXED or IDLE. It stands in
# `python/sglang/srt/model_executor/forward_batch_info.py` (at `003bbaf`), and so does
# `clamp_position`, which gives decode positions: the context minus one, never below zero. K and V
# are written by `MHATokenToKVPool.set_kv_buffer(layer, loc, k, v)` in
# `python/sglang/srt/mem_cache/memory_pool.py` (at `000ccdb`), where `loc` is our slot mapping.
#
# kvlab differs in two places, on purpose. Its running queue is always sorted by priority and arrival,
# so the victim of a preemption was never served in the same step; vLLM under priorities may have to
# take back what it just gave. And a prompt is cut to the free blocks before anybody is preempted. The
# [engine map](../book/engines.md) has the names side by side.

# %% [markdown]
# ## What it cost, what comes next

# %% tags=["hide-input"]
from kvlab.notebook.display import say

one_by_one = sum(len(output.token_ids) for output in together)
say(
    "**What was built**: two counters per request, two queues, one flat row of tokens, and five calls that go "
    "around. Every request gets the tokens it would have had alone.",
    f"**What it cost**: no arithmetic while memory lasts. Six requests in {12 - 1} blocks of 8 tokens took "
    f"{stats.num_preemptions} preemptions and computed {stats.num_recomputed_tokens} tokens again, "
    f"{after.num_recomputed_tokens} with prefix caching. And each stream waits for the whole step.",
    f"**What it made possible**: {one_by_one} outputs of {len(many)} requests in {forwards} forwards instead "
    f"of {one_by_one}; with guesses, {len(listing)} request's {len(without[0].token_ids)} outputs in "
    f"{few} forwards instead of {many_steps}.",
)

# %% [markdown]
# What a step costs in bytes is still open: when does reading K and V outweigh reading the weights,
# and how many requests does a card hold? That is [chapter 8](08_bytes_and_roofline.ipynb).
#
# **References.** Yu et al., *Orca* (OSDI 2022), scheduling per iteration. Kwon et al.,
# *PagedAttention* (SOSP 2023), blocks and preemption. Agrawal et al., *Sarathi-Serve* (OSDI 2024),
# chunked prefill beside decodes. Zheng et al., *SGLang* (2024), prefix reuse. Leviathan et al.,
# *Speculative decoding* (ICML 2023), guess and verify.
