"""costs.py once more, as mathematics and as JavaScript.

Each function of costs.py is called with SymPy symbols instead of numbers. What comes back is
the formula: LaTeX for the formula sheet, JavaScript for the widgets. So a page, a widget, a
table and a test cannot disagree, for they are one piece of arithmetic.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import sympy
from sympy.printing.jscode import JavascriptCodePrinter

from kvlab import costs, roofline
from kvlab.specs import LayerSpec, ModelSpec

#: Python name -> the symbol of the book's notation page.
SYMBOLS = {
    "num_layers": "L",
    "hidden_size": "d",
    "num_heads": "h",
    "num_kv_heads": "h_kv",
    "head_dim": "d_h",
    "intermediate_size": "d_ff",
    "vocab_size": "V",
    "tie_word_embeddings": "u",
    "num_parameters": "P",
    "bytes_per_element": "b",
    "prompt": "p",
    "decode": "n",
    "context": "s",
    "num_tokens": "m",
    "num_queries": "q",
    "num_keys": "k",
    "num_pairs": "N",
    "key_dim": "d_k",
    "value_dim": "d_v",
    "num_flops": "F",
    "num_bytes": "B",
    "bandwidth_bytes_per_second": "W",
    "peak_flops_per_second": "C",
    "batch": "R",
    "num_logit_rows": "r",
    "acceptance": "a",
    "num_drafts": "g",
    "num_calls": "c",
    "seconds_per_call": "o",
    "floor_seconds": "T",
}
_LATEX = {
    "h_kv": r"h_{\mathrm{kv}}",
    "d_ff": r"d_{\mathrm{ff}}",
    "d_h": "d_h",
    "d_k": "d_k",
    "d_v": "d_v",
}
_MODEL_FIELDS = tuple(SYMBOLS)[:8]


def _latex_name(letters: str) -> str:
    return _LATEX.get(letters, letters)


def symbol(name: str) -> sympy.Symbol:
    """The positive symbol that stands for a Python name (`num_layers` -> L)."""
    return sympy.Symbol(SYMBOLS[name], positive=True)


def _symbolic_model() -> SimpleNamespace:
    """A model whose every dimension is a symbol: L equal layers of full attention."""
    fields = {name: symbol(name) for name in _MODEL_FIELDS}
    layer = LayerSpec(
        "full", fields["num_kv_heads"], key_dim=fields["head_dim"], value_dim=fields["head_dim"]
    )
    groups = ((fields["num_layers"], layer),)
    return SimpleNamespace(**fields, layer_groups=groups, is_dense_llama=True)


def _symbolic_layer() -> LayerSpec:
    return LayerSpec("full", symbol("num_kv_heads"), symbol("key_dim"), symbol("value_dim"))


@dataclass(frozen=True)
class Formula:
    """One function of costs.py with the expression it returns for symbols."""

    name: str
    function: Callable
    parameters: tuple[str, ...]
    expression: sympy.Expr
    description: str

    def latex(self) -> str:
        """The right-hand side, factored as a reader would write it."""
        names = {sympy.Symbol(k, positive=True): v for k, v in _LATEX.items()}
        expression = sympy.factor_terms(self.expression)
        return sympy.latex(expression, symbol_names=names, mul_symbol=r"\,")

    def javascript(self) -> str:
        """An exported function with the same name and parameters, in the same order."""
        used = {str(s) for s in self.expression.free_symbols}
        lines = []
        for parameter in self.parameters:
            if parameter in ("spec", "layer"):
                owned = _MODEL_FIELDS if parameter == "spec" else _LAYER_FIELDS
                taken = ", ".join(f"{n}: {SYMBOLS[n]}" for n in owned if SYMBOLS[n] in used)
                lines.append(f"  const {{{taken}}} = {parameter};")
            elif SYMBOLS[parameter] in used:
                lines.append(f"  const {SYMBOLS[parameter]} = {parameter};")
        signature = ", ".join(
            f"{p} = 2" if p == "bytes_per_element" else p for p in self.parameters
        )
        # One division at the end: whole numbers stay exact up to 2^53.
        numerator, denominator = sympy.fraction(sympy.together(self.expression))
        quotient = (
            _js(numerator) if denominator == 1 else f"({_js(numerator)})/({_js(denominator)})"
        )
        body = "\n".join([*lines, f"  return {quotient};"])
        return f"export function {self.name}({signature}) {{\n{body}\n}}"


_LAYER_FIELDS = ("num_kv_heads", "key_dim", "value_dim")


class _Printer(JavascriptCodePrinter):
    """Small whole powers as products: exact, where Math.pow need not be."""

    def _print_Pow(self, expr):  # noqa: N802 (SymPy's naming)
        base, exponent = expr.as_base_exp()
        if exponent.is_Integer and 2 <= exponent <= 4:
            return "*".join([self.parenthesize(base, 50)] * int(exponent))
        return super()._print_Pow(expr)


def _js(expression: sympy.Expr) -> str:
    return _Printer().doprint(expression)


def _formula(function: Callable) -> Formula:
    parameters = tuple(inspect.signature(function).parameters)
    stand_in = {"spec": _symbolic_model, "layer": _symbolic_layer}
    values = [stand_in[p]() if p in stand_in else symbol(p) for p in parameters]
    description = inspect.getdoc(function).split("\n\n")[0].replace("\n", " ")
    expression = sympy.sympify(function(*values))
    return Formula(function.__name__, function, parameters, expression, description)


#: The sections of the formula sheet. Functions of costs.py that take a `min` over windows or a
#: list of layers are sums of these and have no single symbol; they are not listed.
SECTIONS: dict[str, tuple[Formula, ...]] = {
    title: tuple(_formula(f) for f in functions)
    for title, functions in {
        "Parameters": (
            costs.qkv_params_per_layer,
            costs.output_params_per_layer,
            costs.mlp_params_per_layer,
            costs.embedding_params,
            costs.norm_params,
            costs.streamed_params,
            costs.resident_params,
        ),
        "Contexts": (
            costs.sum_of_contexts,
            costs.sum_of_squared_contexts,
            costs.causal_pairs,
        ),
        "FLOPs of a step": (
            costs.projection_flops,
            costs.attention_flops_per_pair,
            costs.attention_flops,
            costs.attention_flops_cached_step,
            costs.attention_flops_uncached_step,
            costs.key_rotation_flops,
            costs.cached_step_flops,
            costs.uncached_step_flops,
        ),
        "FLOPs of a run": (
            costs.cached_run_projection_flops,
            costs.uncached_run_projection_flops,
            costs.cached_run_attention_flops,
            costs.uncached_run_attention_flops,
        ),
        "What the uncached loop repeats": (
            costs.logit_rows_discarded,
            costs.kv_rows_recomputed,
        ),
        "Bytes": (
            costs.layer_kv_bytes_per_token,
            costs.kv_bytes_per_token,
            costs.kv_bytes_read_run,
            costs.kv_bytes_copied_by_concatenation,
            costs.weight_bytes,
            costs.cached_step_bytes,
            costs.run_bytes,
        ),
        "Times": (
            costs.memory_seconds,
            costs.compute_seconds,
            costs.intensity,
        ),
        "Roofline": roofline.LISTED,
    }.items()
}

FORMULAS: dict[str, Formula] = {f.name: f for section in SECTIONS.values() for f in section}


def javascript(names: tuple[str, ...] | None = None) -> str:
    """The named formulas (all of them by default) as the text of one ES module."""
    chosen = FORMULAS.values() if names is None else [FORMULAS[n] for n in names]
    return "\n\n".join(f.javascript() for f in chosen) + "\n"


def sheet_markdown() -> str:
    """The formula sheet: per section a list of name, meaning and formula."""
    parts = []
    for title, formulas in SECTIONS.items():
        parts.append(f"## {title}\n")
        for f in formulas:
            parts.append(f"**`{f.name}`**  \n{f.description}\n\n$$\n{f.latex()}\n$$\n")
    return "\n".join(parts)


#: What a symbol stands for, in the words of the notation page.
_MEANINGS = {
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


def symbols_markdown(*models: ModelSpec) -> str:
    """The notation table: symbol, Python name, meaning, and its value in each of the models."""
    lines = [
        "| symbol | in code | meaning |" + "".join(f" {m.name} |" for m in models),
        "|---|---|---|" + "---:|" * len(models),
    ]
    for name, meaning in _MEANINGS.items():
        values = (getattr(model, name, "") for model in models)
        cells = "".join(f" {int(v):,} |" if v != "" else " |" for v in values)
        lines.append(f"| ${_latex_name(SYMBOLS[name])}$ | `{name}` | {meaning} |{cells}")
    return "\n".join(lines)
