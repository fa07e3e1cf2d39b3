"""kvlab: a decode loop and its KV cache, small enough to read in an evening.

`import kvlab.engine` loads these files and no others. Read them in this order:

    errors          what a door says to bad input: given, expected, what to do
    specs           a model's shape: layers, heads, widths, rotation

One forward, and what it keeps:

    rope            positions; the angles of each scaling rule (RULES); the rotation of Q and K
    attention       softmax over contiguous K and V: the reference that all else is held to
    model           the decoder: weights, norms, products; K and V go out through `attend`

Memory in blocks. Bookkeeping first, without a tensor:

    blocks          BlockPool: free list, reference counts, hashes; release_order says what is
                    evicted first. slot_of: position -> slot
    request         Request: its tokens, its counters, its block table
    tables          BlockManager: room for the next tokens, copy on write, prefix hits by hash
    paged           PagedKVCache: the tensors of K and V, how they lie and in what format;
                    write by slot, read by block table, attend

Many requests, one forward a step:

    scheduler       tokens known - tokens computed, cut to budget and blocks; who waits and why
    batch           the chosen tokens in one flat row, and the lists that find them again
    sampling        logits -> tokens, and drafts that are verified
    kernels         its door alone: which attention decodes on this device
    engine          Engine.step(): schedule, prepare, execute, sample, update

So one step goes: engine asks scheduler (which takes blocks through tables), batch lays the row,
model computes it and hands K and V to paged, sampling picks tokens, and scheduler counts them and
tables publishes what is full.

Beside the path, still core:

    costs           every formula of the book, once: FLOPs, bytes, seconds, formats of K and V
    cache           the contiguous cache of chapter 2, and the one that grows by concatenation
    generate        the loops of chapters 1 to 5: naive, cached, padded, paged
    fast            the model's products for one token on a CPU: equal, and quicker
    integrity       what must hold around every step; tests and chapters look, the engine never

Wings, which the core never imports: configs/ reads any config.json, checkpoint/ loads real
weights, sheet/ is the calculator and the command line, faults/ are known bugs to switch on,
notebook/ is what chapters and pages show. And kernels/ is the same attention in Triton.
"""

__version__ = "0.1.0"
