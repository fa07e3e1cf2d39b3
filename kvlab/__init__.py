"""kvlab: a decode loop and its KV cache.

The path from a cost to an engine is small enough to read in an evening. In this order:

    specs, costs                            the nouns, and every formula once
    rope, cache, attention, model           one forward, and what it keeps
    generate                                the loops of chapters 1 and 2
    sequence, slots, blocks, block_tables   bookkeeping of paged memory, no torch
    paged_cache, paged_attention            the same, in tensors
    schedule, scheduler, batch              who runs in a step, and as what
    engine                                  the step, around and around
    kernels/paged_decode                    attention over blocks, in Triton

Everything else hangs off that path: the config reader (configs/), the real weights (checkpoint/),
answers for the command line and the widgets (reports/, audit/), faults/, exercises/, widgets/.
"""

__version__ = "0.1.0"
