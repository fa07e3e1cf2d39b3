"""The page's formulas and JavaScript are costs.py, and not something like it."""

import inspect
import json
import random
import subprocess
from collections.abc import Callable
from dataclasses import replace

import pytest

from book.extension import page_text
from kvlab import costs
from kvlab.configs import preset
from kvlab.notebook import formulas
from kvlab.specs import LayerSpec

NUM_SHAPES = 2_000
FUNCTIONS = [f for section in page_text.SECTIONS.values() for f in section]


def random_arguments(rng: random.Random, function: Callable):
    """(arguments for Python, the same for JavaScript) of one random shape."""
    ratio, num_kv_heads = rng.choice([1, 2, 3, 4, 8]), rng.randint(1, 16)
    model = {
        "num_layers": rng.randint(1, 128),
        "hidden_size": rng.randint(8, 16_384),
        "num_heads": ratio * num_kv_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": rng.randint(2, 256),
        "intermediate_size": rng.randint(8, 65_536),
        "vocab_size": rng.randint(16, 262_144),
        "tie_word_embeddings": rng.random() < 0.5,
    }
    layer = LayerSpec("full", num_kv_heads, model["head_dim"], model["head_dim"])
    layers = (layer,) * model["num_layers"]
    scalars = {
        "num_parameters": rng.randint(10**6, 10**12),
        "bytes_per_element": rng.choice([1, 2, 4]),
        "prompt": rng.randint(0, 200_000),
        "decode": rng.randint(1, 50_000),
        "bandwidth_bytes_per_second": rng.uniform(1e9, 1e13),
        "peak_flops_per_second": rng.uniform(1e9, 1e15),
        "acceptance": rng.uniform(0.01, 0.95),
        "num_drafts": rng.randint(1, 8),
    }
    python, javascript = [], []
    for name in inspect.signature(function).parameters:
        if name == "spec":
            python.append(replace(preset("llama-3-8b"), **model, layers=layers))
            javascript.append(model)
        elif name == "layer":
            wide = LayerSpec("full", num_kv_heads, rng.randint(1, 600), rng.randint(1, 600))
            python.append(wide)
            javascript.append(
                {n: getattr(wide, n) for n in ("num_kv_heads", "key_dim", "value_dim")}
            )
        else:
            value = scalars.get(name, rng.randint(1, 200_000))
            python.append(value)
            javascript.append(value)
    return python, javascript


def test_javascript_equals_python_on_random_shapes(tmp_path):
    """Whole numbers below 2^53 are equal to the unit; beyond it, to 1e-12."""
    rng = random.Random(20261129)
    calls, expected = [], []
    for i in range(NUM_SHAPES * 2):
        function = FUNCTIONS[i % len(FUNCTIONS)]
        python, javascript = random_arguments(rng, function)
        calls.append([function.__name__, javascript])
        expected.append(function(*python))
    (tmp_path / "formulas.mjs").write_text(formulas.javascript(FUNCTIONS))
    (tmp_path / "calls.json").write_text(json.dumps(calls))
    (tmp_path / "run.mjs").write_text(
        'import * as f from "./formulas.mjs";\n'
        'import { readFileSync } from "node:fs";\n'
        'const calls = JSON.parse(readFileSync("calls.json", "utf8"));\n'
        "console.log(JSON.stringify(calls.map(([name, args]) => f[name](...args))));\n"
    )
    run = subprocess.run(
        ["node", "run.mjs"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    got = json.loads(run.stdout)
    assert len(got) == len(expected) == 2 * NUM_SHAPES
    for call, value, want in zip(calls, got, expected, strict=True):
        if isinstance(want, int) and want < 2**53:
            assert value == want, call
        else:
            assert value == pytest.approx(want, rel=1e-12), call


def test_every_cost_without_layers_or_windows_is_on_the_sheet():
    """A new function of costs.py must be listed, or be one of the sums that have no symbol."""
    public = {
        name
        for name, f in inspect.getmembers(costs, inspect.isfunction)
        if f.__module__ == "kvlab.costs" and not name.startswith("_")
    }
    assert public - {function.__name__ for function in FUNCTIONS} == {
        "kv_bytes", "bytes_per_token_from_query_heads", "concurrency", "expanded",
        "fixed_bytes_per_sequence", "growing_bytes_per_token", "kept_tokens", "longest_context",
        "num_blocks", "padded_to_full", "paged_kv_bytes", "per_rank", "pool_bytes", "pool_tokens",
        "roofline_seconds", "sequence_bytes", "sequences_that_fit", "window_cap_bytes",
        "with_mtp", "index_bytes_per_token", "with_indexer", "with_scales",
        "bias_params", "window_pairs", "compressed_bytes_per_token",
    }  # fmt: skip


def test_symbols_are_unique():
    used = list(page_text.SYMBOLS.values())
    assert len(used) == len(set(used))


def test_latex_of_the_two_steps():
    assert page_text.latex(costs.cached_step_flops) == r"2\,\left(2\,L\,d_h\,h\,s + P\right)"
    sheet = page_text.formula_sheet()
    assert all(f"`{function.__name__}`" in sheet for function in FUNCTIONS)


def test_a_widget_gets_the_formulas_it_calls():
    called = formulas.called_in("const f = cached_step_flops(spec, P, s) / intensity_limit;")
    assert called == [costs.cached_step_flops]


def test_the_formats_page_counts_every_format_with_its_scales():
    rows = [line.split(" | ") for line in page_text.formats_table().splitlines()[2:]]
    found = {name.strip("| `"): (each, rate) for name, _, each, rate, _ in rows}
    assert set(found) == set(costs.FORMATS)
    assert found["bf16"] == ("2", "131,072")
    assert found["int8_per_token_head"] == ("1.03125", "67,584")
    assert found["q4_0"] == ("0.5625", "36,864")
