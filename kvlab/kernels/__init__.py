"""The Triton paged decode kernel, its launcher, and two checks that need no GPU.

Nothing is imported here: Triton reads TRITON_INTERPRET when it is first imported, so whoever
wants the interpreter must be able to set it before importing `kvlab.kernels.paged_decode`.

    splits        how a KV range is cut into splits and tiles (stdlib only)
    reference     the same mathematics in torch, by gather
    walk          the kernel's steps in torch, one program after another
    paged_decode  the two Triton kernels
    checks        what a caller may pass, with named errors
    launch        paged_decode(query, key_cache, value_cache, block_tables, seq_lens)
    trace         which addresses the kernel touched (interpreter only)
    lesson        where a reader's own inner step and merge are put in (chapter 6)
    compiling     compile one variant for a GPU that is not here
    machine_code  registers, spills and instructions of what was compiled
    records       the recorded report and measurements that the chapter shows
    report        python -m kvlab.kernels.report
    bench         python -m kvlab.kernels.bench
    rivals        what bench compares with
"""
