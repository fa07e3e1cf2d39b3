"""The command line, run as a reader runs it."""

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvlab.configs import read_config
from kvlab.sheet import SheetError, cost_report

ROOT = Path(__file__).resolve().parent.parent


def kvlab(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "kvlab", *arguments], capture_output=True, text=True, check=False
    )


def test_cost_json_of_the_running_example():
    run = kvlab("cost", "llama-3-8b", "--params", "8.03e9", "--json")
    assert run.returncode == 0 and run.stderr == ""
    report = json.loads(run.stdout)
    assert report["uncached"]["total_flops"] == 19_664_983_065_821_184
    assert report["cached"]["total_flops"] == 8_841_329_508_352
    assert round(report["ratio"], 1) == 2224.2
    assert report["kv_bytes_final"] == 335_544_320
    assert round(report["floor_seconds"], 3) == 2.501


def test_cost_text_names_its_units_and_accounting():
    run = kvlab("cost", "smollm2-135m", "--prompt", "10", "--decode", "3")
    assert run.returncode == 0
    assert "coarse" in run.stdout and "22.50 KiB (23.04 kB)" in run.stdout


def test_cost_of_a_config_file(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "hidden_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "intermediate_size": 128,
                "vocab_size": 100,
            }
        )
    )
    report = json.loads(kvlab("cost", str(config), "--params", "exact", "--json").stdout)
    assert report["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 2
    assert report["num_parameters"] == 2 * (64 * 8 * 16 + 64 * 64 + 3 * 64 * 128) + 6400


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "`kvlab --help` lists"),
        (["cost"], "`kvlab cost --help` lists"),
        (["guess"], "`kvlab --help` lists"),
        (["cost", "no-such-model"], "no-such-model"),
        (["cost", "llama-3-8b", "--decode", "0"], "--decode"),
        (["cost", "llama-3-8b", "--params", "lots"], "--params"),
        (["cost", "llama-3-8b", "--params", "0.5"], "--params"),
        (["cost", "llama-3-8b", "--bandwidth", "-1"], "--bandwidth"),
        (["models", "--kv-dtype", "int8_g128"], "row of 576 elements"),
        (["cost", "falcon-7b"], "give the number that a token uses (--params 8.03e9)"),
        (["cost", "mixtral-8x7b", "--params", "exact"], "Mixtral-8x7B (mixtral)"),
        (["cost", "jamba-v0.1", "--params", "1e9"], "recurrent; expected attention to all tokens"),
        (["cost", "deepseek-v3", "--params", "3.7e10"], "`kvlab kv` sizes this model's cache"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, word):
    run = kvlab(*arguments)
    assert run.returncode == 2 and run.stdout == ""
    assert word in run.stderr and "Traceback" not in run.stderr
    assert run.stderr.count("\n") == 1


@pytest.mark.parametrize("model", ["falcon-7b", "mixtral-8x7b", "gpt-2"])
def test_cost_of_another_shape_takes_the_number_of_parameters(model):
    run = kvlab("cost", model, "--params", "7e9", "--json")
    assert run.returncode == 0 and json.loads(run.stdout)["num_parameters"] == 7_000_000_000


@pytest.mark.parametrize(
    "changes",
    [
        {"v_head_dim": 8},
        {"num_key_value_heads": [1, 2]},
        {"model_type": "falcon_h1", "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_state": 8},
    ],
)
def test_cost_refuses_layers_that_its_formulas_do_not_cover(changes):
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 100,
              "num_attention_heads": 4, "num_key_value_heads": 2, **changes}  # fmt: skip
    with pytest.raises(SheetError, match="nothing beside them"):
        cost_report(read_config(config), params=1e9)


def test_a_closed_pipe_is_no_error():
    run = subprocess.run(
        f"{sys.executable} -m kvlab models | head -1", shell=True, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert run.stdout and run.stderr == ""


def in_an_empty_environment(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess:
    """kvlab as its wheel lays it out, in a Python that sees nothing but the standard library."""
    target = tmp_path / "installed"
    if not target.exists():
        build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
        wheel = build["targets"]["wheel"]
        ignored = shutil.ignore_patterns("__pycache__")
        for package in wheel["packages"]:
            shutil.copytree(ROOT / package, target / package, ignore=ignored)
        for source, place in wheel["force-include"].items():
            shutil.copytree(ROOT / source, target / place)
    code = f"import sys; sys.path.insert(0, {str(target)!r}); {arguments[0]}"
    return subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True,
                          check=False, cwd=tmp_path)  # fmt: skip


COMMANDS = (
    ["cost", "llama-3-8b"],
    ["kv", "deepseek-v3.2", "--mtp"],
    ["models"],
    ["audit", "--config", "llama-3-8b", "--log", str(ROOT / "data/engine_logs/sglang-mha.log")],
)


def test_pkg_01_every_command_without_the_extras(tmp_path):
    run = "from kvlab.sheet.cli import main; sys.exit(main({}))"
    for command in COMMANDS:
        done = in_an_empty_environment(tmp_path, run.format(command))
        assert done.returncode == 0 and done.stdout, (command, done.stderr)
    faults = in_an_empty_environment(tmp_path, run.format(["faults"]))
    assert faults.returncode == 2
    assert faults.stderr == "kvlab: needs torch: pip install 'kvlab[torch]'\n"


def test_pkg_01_every_public_import_answers_or_names_the_package(tmp_path):
    """A module that needs an extra says so by Python's own error, which names the package."""
    allowed = ("torch", "numpy", "pandas", "plotly", "ipywidgets", "anywidget", "traitlets",
               "sympy", "IPython", "triton", "safetensors", "tokenizers", "filelock", "tqdm",
               "transformers")  # fmt: skip
    names = [p.stem for p in (ROOT / "kvlab").glob("*.py") if not p.stem.startswith("__")]
    code = (
        f"import importlib\nfor name in {sorted([*names, 'configs', 'sheet', 'faults'])!r}:\n"
        "    try: importlib.import_module('kvlab.' + name); print(name)\n"
        f"    except ModuleNotFoundError as error: assert error.name in {allowed!r}, (name, error)"
    )
    done = in_an_empty_environment(tmp_path, f"exec({code!r})")
    assert done.returncode == 0, done.stderr
    assert {"costs", "specs", "configs", "sheet", "scheduler"} <= set(done.stdout.split())


def test_pkg_01_the_command_line_asks_for_no_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == []
    assert "kvlab[torch,notebook]" in project["optional-dependencies"]["checkpoint"]
