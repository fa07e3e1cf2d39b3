"""kvlab: a decode loop and its KV cache, small enough to read in an evening.

`import kvlab.engine` loads the files of the first four lists and no others. In reading order:

    errors          the named errors, raised where input comes in from outside (the "doors")
    specs           a model's shape: layers, heads, widths, rotation settings

One forward, and what it makes:

    rope            positions; the angles, one function for each rotation rule (RULES); rotate Q, K
    attention       softmax over contiguous K and V: the reference that all else is held to
    model           the decoder: weights and matrix products. It owns no cache: in each layer it
                    calls attend(layer, q, k, v), which the caller brings

Memory in blocks of some tokens each; all but `paged` is bookkeeping without a tensor:

    blocks          BlockPool hands out block ids: free list, reference counts, and the map by
                    which a full block is found by a hash of all tokens up to its end. Its method
                    release_order decides what is evicted first. slot_of: position -> slot, the
                    place of one token in the pool
    request         Request: its tokens, its counters, its block table
    tables          BlockManager moves requests through the pool: room for the next tokens, a copy
                    where a shared block is written, prefixes found again, full blocks published
    paged           PagedKVCache: the tensors of K and V and how their numbers are stored (write by
                    slot, read by block table), and PagedAttention, an `attend` over it

Many requests, one forward a step:

    scheduler       tokens known - tokens computed, cut to the step's budget (so long prompts run
                    in chunks) and to free blocks; who waits, and why; who is preempted
    batch           the chosen tokens of all requests in one flat row, and lists to find them again
    sampling        logits -> tokens; guesses (drafts) made from the text, and verified
    kernels         only its __init__, which picks the attention for this device: PagedAttention,
                    or on a GPU the Triton kernel from the folder kernels/, loaded when picked
    engine          Engine.step(): schedule, prepare, execute, sample, update

So one step goes, by the names of its five phases. Schedule: engine asks for drafts and then
scheduler, which takes blocks through tables. Prepare: batch lays the row. Execute: engine's
ModelRunner does the block copies that tables asked for, and runs model over the row with an attend
from paged: model has Q and K turned by rope, attend writes K and V and reads all of them back.
Sample: sampling picks tokens, and says which drafts hold. Update: scheduler books them, and tables
publishes what is full now: other requests may find those blocks.

Where to add something. A position scheme: a rotation rule is one more function in rope.RULES,
named by the model's spec. The others are subclasses that Engine is given: an eviction rule is a
BlockPool with another release_order (pool=), a scheduling policy a Scheduler (scheduler=), a format
of K and V a PagedKVCache that stores and reads another way (cache=), with its bytes in costs,
and attention="torch" until the Triton kernel can read it.

Also core, but no part of the engine:

    costs           every formula of the book, once: FLOPs, bytes, seconds; bytes of each KV format
    cache           the contiguous cache of chapter 2, and one grown by concatenation, to compare
    generate        the loops of chapters 1 to 5: naive (no cache), cached, padded, paged
    fast            quicker matrix products for one token on a CPU, given to model when it is made
    integrity       what must hold around every step; tests and chapters look, the engine never

Wings, which the core never imports: configs/ reads any config.json, checkpoint/ loads real
weights, sheet/ is the calculator and the command line, faults/ are known bugs to switch on,
notebook/ is what chapters and pages show.
"""

__version__ = "0.1.0"
