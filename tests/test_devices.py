"""Every forward on a pretended GPU: no two devices meet, and nothing is read back.

The same forwards run with numbers in test_generate, test_paged and test_engine; here it is only
asked where tensors lie. That the pretended card notices both faults is the first test.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pretend_gpu import GPU, PretendGpu, on_the_gpu
from small_models import tiny_spec
from test_families import CASES, config_of
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensorDeviceMismatchError,
)

from kvlab.attention import CachedAttention, UncachedAttention
from kvlab.cache import ConcatenatedKVCache, ContiguousKVCache
from kvlab.configs import read_config
from kvlab.engine import Engine
from kvlab.fast import products_for
from kvlab.generate import cached_generate, naive_generate, padded_generate, paged_generate
from kvlab.kernels import choose
from kvlab.kernels.paged_decode import misfits
from kvlab.model import Decoder, random_weights
from kvlab.paged import PagedAttention, PagedKVCache
from kvlab.sampling import NgramProposer, Sampler, SamplingParams

SPECS = {
    "full": tiny_spec(),
    "windows": tiny_spec(window=3),
    "mixed windows": replace(
        tiny_spec(), layers=(*tiny_spec(window=3).layers[:2], tiny_spec().layers[2])
    ),
    "own head": tiny_spec(tie_word_embeddings=False),
    **{
        f"{family}-{name}": read_config(config_of(family, **changes))
        for (family, name), changes in CASES.items()
    },
}  # fmt: skip


def model_on_gpu(spec) -> Decoder:
    return Decoder(spec, on_the_gpu(random_weights(spec)), products_for(GPU))


@pytest.fixture
def card():
    with PretendGpu() as card:
        yield card


@pytest.fixture(params=SPECS)
def model(request, card) -> Decoder:
    return model_on_gpu(SPECS[request.param])


def row(start: int, stop: int) -> torch.Tensor:
    return torch.arange(start, stop, device=GPU)[None]


def through_the_host(attend):
    """A planted fault: K takes a way over the CPU."""
    return lambda layer, query, key, value: attend(layer, query, key.cpu(), value)


def test_the_pretended_card_notices_a_tensor_elsewhere_and_a_number_read_back(card):
    model = model_on_gpu(SPECS["full"])
    attend, tokens = UncachedAttention(model.spec), row(0, 4)
    assert model.forward(tokens, row(0, 4), attend).device == GPU
    with pytest.raises(FakeTensorDeviceMismatchError):
        model.forward(tokens, torch.arange(4)[None], attend)
    with pytest.raises(RuntimeError, match="same device"):
        model.forward(tokens, row(0, 4), through_the_host(attend))
    assert card.num_read_back == 0
    assert int(tokens[0, 0]) == 0 and tokens.tolist() == [[0] * 4] and card.num_read_back == 2
    with pytest.raises(DataDependentOutputException):
        bool(tokens[0, 0])


@pytest.mark.parametrize("cache_class", [ContiguousKVCache, ConcatenatedKVCache])
def test_naive_and_cached_forwards(card, model, cache_class):
    spec = model.spec
    logits = model.forward(row(0, 7), row(0, 7), UncachedAttention(spec))
    assert logits.device == GPU and logits.shape == (1, 7, spec.vocab_size)
    where = (torch.float32, GPU) if cache_class is ContiguousKVCache else ()
    cache = cache_class(spec, 1, 12, *where)
    attend = CachedAttention(spec, cache)
    for start, stop in ((0, 5), (5, 8), (8, 9)):  # a prompt, a chunk, a token
        logits = model.forward(row(start, stop), row(start, stop), attend, rows="last")
        cache.advance(stop - start)
        assert logits.device == GPU and logits.shape == (1, spec.vocab_size)
    assert card.num_read_back == 0


@pytest.mark.parametrize("attention", [PagedAttention, choose.KernelPagedAttention])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_ragged_batch_over_blocks(card, model, monkeypatch, attention, layout):
    """A chunk, two decode rows of different lengths, a padding row."""

    def paged_decode(*case, window, max_seq_len, check):
        assert list(misfits(*case, None, window, None)) == []
        return torch.empty_like(case[0]), None

    monkeypatch.setattr(choose, "paged_decode", paged_decode)
    cache = PagedKVCache(model.spec, 5, 4, torch.float32, GPU, layout)
    attend = attention(
        model.spec,
        cache,
        slot_mapping=[4, 5, 6, 17, 9, -1],
        block_tables=[[1], [3, 4], [2], [0]],
        seq_lens=[3, 6, 2, 0],
        query_start_loc=[0, 3, 4, 5, 6],
    )
    ids = row(0, 6)[0]
    logits = model.forward(ids, ids, attend, rows=torch.tensor([2, 3, 4], device=GPU))
    assert logits.device == GPU and logits.shape == (3, model.spec.vocab_size)
    assert card.num_read_back == 0
    cache.copy_block(1, 2)
    assert cache.read(0, [3, 4], 6)[0].device == GPU


def test_every_loop_reads_back_one_id_a_forward_and_a_rectangle_once(card, model):
    prompt = [1, 2, 3, 4, 5]
    for loop in (naive_generate, cached_generate, paged_generate):
        card.num_read_back = 0
        assert loop(model, prompt, 6) == [0] * 6
        assert card.num_read_back == 6
    card.num_read_back = 0
    assert padded_generate(model, [prompt, [7, 8]], 4) == [[0] * 4] * 2
    assert card.num_read_back == 1


@pytest.mark.parametrize("attention", [PagedAttention, choose.KernelPagedAttention])
def test_an_engine_reads_back_once_a_step(card, model, monkeypatch, attention):
    """Greedy and drawn, with drafts, sharing and preemption: the host waits once a step."""
    monkeypatch.setattr(
        choose, "paged_decode", lambda query, *case, **options: (torch.empty_like(query), None)
    )
    engine = Engine(
        model, num_blocks=9, block_size=4, attention=attention, proposer=NgramProposer(),
        max_num_batched_tokens=8,
    )  # fmt: skip
    monkeypatch.setattr(Sampler, "_number", lambda *_: 0.5)  # the host's own
    drawn = SamplingParams(temperature=0.8, top_k=5, top_p=0.9)
    for prompt, sampling in (([1, 2, 3, 4, 5, 6, 7, 8, 9], None), ([1, 2, 3, 4, 5], drawn)):
        engine.add_request(prompt, max_new_tokens=9, sampling=sampling)
    while engine.has_requests:
        card.num_read_back = 0
        step = engine.step()
        assert card.num_read_back == (not step.schedule.is_idle)
