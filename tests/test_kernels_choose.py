"""Which attention decodes where, and that both give the same tokens."""

from __future__ import annotations

import pytest
import torch
from small_models import tiny_spec

from kvlab.engine import Engine
from kvlab.errors import BlockError
from kvlab.kernels import KernelError, choose
from kvlab.kernels.choose import half_dtype
from kvlab.model import Decoder
from kvlab.paged import PagedAttention, PagedKVCache

CPU = torch.device("cpu")


def never() -> str | None:
    raise AssertionError("no trial is needed here")


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_supported_gpus_take_the_kernel_untried(capability) -> None:
    name, reason = choose.decide(capability, never)
    assert name == "triton" and f"{capability[0]}.{capability[1]}" in reason


def test_an_older_gpu_takes_the_kernel_if_a_small_case_is_right() -> None:
    name, reason = choose.decide((7, 5), lambda: None)
    assert name == "triton" and "7.5" in reason and "came out right" in reason


def test_an_older_gpu_falls_back_with_the_reason() -> None:
    name, reason = choose.decide((7, 5), lambda: "a small case came out wrong by 0.3")
    assert name == "torch" and "7.5" in reason and "wrong by 0.3" in reason


def test_no_gpu_no_triton_and_the_interpreter_mean_torch() -> None:
    assert choose.decide(None, never)[0] == "torch"
    assert "not installed" in choose.decide((9, 0), never, has_triton=False)[1]
    assert "interpreter" in choose.decide((9, 0), never, interpreted=True)[1]


def test_nb_08_dtype_by_capability_not_by_is_bf16_supported(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
    assert half_dtype((7, 5))[0] == torch.float16
    assert half_dtype((8, 0))[0] == torch.bfloat16


def test_the_trial_passes_here_and_reports_a_wrong_or_broken_kernel(monkeypatch) -> None:
    assert choose.try_small_case(CPU, torch.float16) is None
    monkeypatch.setattr(
        choose, "paged_decode", lambda query, *_, **__: (query.new_full(query.shape, 9.0), None)
    )
    assert "wrong by" in choose.try_small_case(CPU, torch.float16)

    def broken(*_, **__):
        raise RuntimeError("PassManager::run failed\nand a long tail")

    monkeypatch.setattr(choose, "paged_decode", broken)
    problem = choose.try_small_case(CPU, torch.float16)
    assert problem == "a small case failed with RuntimeError: PassManager::run failed"


def test_choose_backend_on_this_machine() -> None:
    chosen = choose.choose_backend("cpu")
    assert chosen.name == "torch" and chosen.attention is PagedAttention
    assert chosen.dtype == torch.float32 and "fp32" in chosen.dtype_reason
    asked = choose.choose_backend("cpu", prefer="triton")
    assert asked.name == "triton" and asked.attention is choose.KernelPagedAttention
    with pytest.raises(KernelError, match="expected 'triton', 'torch'"):
        choose.choose_backend("cpu", prefer="cuda")


@pytest.mark.parametrize("window", [None, 6])
def test_the_engine_decodes_through_the_kernel_as_through_torch(window) -> None:
    model = Decoder.random(tiny_spec(num_layers=2, window=window), seed=3)
    prompts = [[7, 3, 9, 4, 1, 8, 2], [5], [11, 12, 13, 14]]
    options = {"num_blocks": 33, "block_size": 4, "max_num_batched_tokens": 6}
    outputs = {}
    for attention in (PagedAttention, choose.KernelPagedAttention):
        engine = Engine(model, attention=attention, **options)
        outputs[attention] = [o.token_ids for o in engine.generate(prompts, [6, 3, 5])]
    assert outputs[PagedAttention] == outputs[choose.KernelPagedAttention]
    assert [len(ids) for ids in outputs[PagedAttention]] == [6, 3, 5]


def test_a_mixed_batch_equals_torch_row_by_row_in_both_layouts() -> None:
    spec = tiny_spec(num_layers=1)
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(6, heads, 8, generator=generator) for heads in (6, 2, 2)]
    batch = {
        "slot_mapping": [4, 5, 6, 17, 9, -1],
        "block_tables": [[1, 0], [3, 4], [2, 0], [0, 0]],
        "seq_lens": [3, 6, 2, 0],
        "query_start_loc": [0, 3, 4, 5, 6],
    }
    stored = torch.randn(2, 5, 4, 2, 8, generator=generator)
    results = []
    for layout in ("NHD", "HND"):
        for attention in (PagedAttention, choose.KernelPagedAttention):
            cache = PagedKVCache(spec, 5, 4, layout=layout)
            cache.key_cache(0).copy_(stored[0])
            cache.value_cache(0).copy_(stored[1])
            results.append(attention(spec, cache, **batch)(0, *qkv))
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, atol=1e-5, rtol=1e-5)
    assert not results[1][5].any(), "the empty sequence's row"


def test_page_07_the_engine_path_checks_tables_once_per_step() -> None:
    spec = tiny_spec(num_layers=1)
    with pytest.raises(BlockError, match="pool has blocks 1 to 4"):
        choose.KernelPagedAttention(
            spec,
            PagedKVCache(spec, 5, 4),
            slot_mapping=[4],
            block_tables=[[1, 5]],
            seq_lens=[6],
            query_start_loc=[0, 1],
        )
