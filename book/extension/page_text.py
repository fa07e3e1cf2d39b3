"""The computed parts of the pages in book/, as Markdown. The extension fills them in.

Each function here is named by a substitution (`{{ models_table }}`), so that no page holds a
typed number. Text that comes from docstrings is shown as it is written, not read as Markdown.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path

import sympy

import kvlab
from book.extension import models_table as models
from book.extension.field_guide import field_guide_markdown
from kvlab import costs, faults
from kvlab.configs import model_names, preset
from kvlab.notebook.formulas import expression, symbol
from kvlab.sheet import cost_report, kv_report, units
from kvlab.specs import DATA_DIR

PACKAGE = Path(kvlab.__file__).resolve().parent
#: What a symbol stands for, in the words of the notation page.
MEANINGS = {
    "num_layers": "layers",
    "hidden_size": "width of the hidden state",
    "num_heads": "query heads",
    "num_kv_heads": "KV heads: what the cache holds",
    "head_dim": "width of one head",
    "intermediate_size": "width of the MLP",
    "vocab_size": "vocabulary",
    "tie_word_embeddings": "1 if the output head is the input embedding, else 0",
    "num_parameters": "parameters a token passes through, see below",
    "bytes_per_element": "bytes of one cached or stored number",
    "prompt": "tokens of the prompt",
    "decode": "decode forwards after prefill",
    "context": "context of a step, the token being fed included",
}
_SHEET = json.loads((DATA_DIR / "formulas.json").read_text("utf-8"))
#: Python name -> the letter of the book's notation page.
SYMBOLS: dict[str, str] = _SHEET["symbols"]
#: Letters that LaTeX writes in another way than SymPy would.
LATEX: dict[str, str] = _SHEET["latex"]
#: The sections of the formula sheet, and the functions of costs.py in each.
SECTIONS: dict[str, list[Callable]] = {
    title: [getattr(costs, name) for name in names] for title, names in _SHEET["sections"].items()
}


def latex(function: Callable) -> str:
    """The right-hand side of one function of costs.py, factored as a reader would write it."""
    letters = {symbol(name): symbol(letter) for name, letter in SYMBOLS.items()}
    formula = sympy.factor_terms(expression(function).xreplace(letters))
    names = {symbol(letter): text for letter, text in LATEX.items()}
    return sympy.latex(formula, symbol_names=names, mul_symbol=r"\,")


def formula_sheet() -> str:
    """Every formula of costs.py: per section a list of name, meaning and formula."""
    parts = []
    for title, section in SECTIONS.items():
        parts.append(f"## {title}\n")
        for function in section:
            name, meaning = function.__name__, _first(inspect.getdoc(function))
            parts.append(f"**`{name}`**  \n{meaning}\n\n$$\n{latex(function)}\n$$\n")
    return "\n".join(parts)


def symbols_table() -> str:
    """The letters of the formulas: symbol, Python name, meaning, and its value in two models."""
    specs = [preset("llama-3-8b"), preset("smollm2-135m")]
    lines = [
        "| symbol | in code | meaning |" + "".join(f" {spec.name} |" for spec in specs),
        "|---|---|---|" + "---:|" * len(specs),
    ]
    for name, meaning in MEANINGS.items():
        letter = SYMBOLS[name]
        values = (getattr(spec, name, "") for spec in specs)
        cells = "".join(f" {int(v):,} |" if v != "" else " |" for v in values)
        lines.append(f"| ${LATEX.get(letter, letter)}$ | `{name}` | {meaning} |{cells}")
    return "\n".join(lines)


def other_letters() -> str:
    """The letters of the formulas that the table leaves out, with their names in code."""
    return ", ".join(
        f"${letter}$ `{name}`" for name, letter in SYMBOLS.items() if name not in MEANINGS
    )


def running_example() -> dict[str, str]:
    """Llama-3-8B, p = 2048, n = 512: the numbers that pages quote, as text, by name."""
    spec = preset("llama-3-8b")
    run = cost_report(spec, prompt=2048, decode=512)
    return {
        "model": spec.name,
        "prompt": f"{run['prompt']:,}",
        "decode": f"{run['decode']:,}",
        "context": f"{run['prompt'] + run['decode']:,}",
        "uncached": units.flops(run["uncached"]["total_flops"]),
        "cached": units.flops(run["cached"]["total_flops"]),
        "ratio": f"{run['ratio']:,.0f}",
        "rows": f"{run['rows_discarded_last_step']:,}",
        "kv_per_token": units.binary_bytes(run["kv_bytes_per_token"]),
        "kv_final": units.both_bytes(run["kv_bytes_final"]),
        "weights": units.decimal_bytes(run["weight_bytes_per_step"]),
        "floor": units.seconds(run["floor_seconds_per_step"]),
        "num_faults": str(len(faults.all_faults())),
        "num_models": str(len(model_names())),
    }


def formats_table() -> str:
    """Every format of K and V: bytes of an element, and of a token of the running example."""
    spec = preset("llama-3-8b")
    lines = [
        f"| format | values + scales | bytes per value | {spec.name}, bytes per token | of bf16 |",
        "|---|---|---:|---:|---:|",
    ]
    full = kv_report(spec)["kv_bytes_per_token_growing"]
    for name, storage in costs.FORMATS.items():
        if name == "fp8_ds_mla":  # of latent rows alone: this model has none
            lines.append(f"| `{name}` | {storage.note} | – | – | – |")
            continue
        rate = kv_report(spec, kv_dtype=name)["kv_bytes_per_token_growing"]
        each = rate / costs.kv_bytes_per_token(spec, 1)
        note = storage.note or f"{storage.block_bytes} bytes a value"
        lines.append(f"| `{name}` | {note} | {each:g} | {rate:,} | {rate / full:.1%} |")
    return "\n".join(lines)


def models_table() -> str:
    """Every preset: what its layers keep, and what a context costs."""
    return models.models_html()


def field_guide() -> str:
    """Every registered fault."""
    return field_guide_markdown()


def api() -> str:
    """Each module of kvlab with its public functions and classes, read from the source text."""
    paths = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__main__.py")
    return "\n\n".join(part for part in map(_module, paths) if part)


def _module(path: Path) -> str:
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    tree = ast.parse(path.read_text("utf-8"))
    entries = [
        _entry(node)
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]
    if not entries:
        return ""
    title = name.removesuffix(".__init__")
    return "\n".join([f"## `{title}`", "", _plain(_first(ast.get_docstring(tree))), "", *entries])


def _entry(node: ast.FunctionDef | ast.ClassDef) -> str:
    if isinstance(node, ast.FunctionDef):
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        signature = f"{node.name}({ast.unparse(node.args)}){returns}"
    else:
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        signature = f"class {node.name}" + (f"({bases})" if bases else "")
    line = f"- `` {signature} ``: {_plain(_first(ast.get_docstring(node)))}"
    if not isinstance(node, ast.ClassDef):
        return line
    methods = [
        f"  {_entry(child)}"
        for child in node.body
        if isinstance(child, ast.FunctionDef)
        and not child.name.startswith("_")
        and ast.get_docstring(child)
    ]
    return "\n".join([line, *methods])


def _first(text: str | None) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((text or "").strip().split("\n\n")[0].split())


def _plain(text: str) -> str:
    """Text with what Markdown would read escaped, but code between backticks left alone."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(
        piece if piece.startswith("`") else re.sub(r"([\\*_\[\]<>$|#{}~])", r"\\\1", piece)
        for piece in pieces
    )
