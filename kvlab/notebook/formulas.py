"""costs.py once more, as mathematics and as JavaScript.

Each function of costs.py is called with SymPy symbols instead of numbers. What comes back is the
formula: JavaScript for the widgets, LaTeX for the formula sheet (book/extension). So a page, a
widget, a table and a test cannot disagree, for they are one piece of arithmetic.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import sympy
from sympy.printing.jscode import JavascriptCodePrinter

from kvlab import costs
from kvlab.specs import LayerSpec

#: Parameters that are objects: the fields that a formula takes out of them.
FIELDS = {
    "spec": (
        "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size",
        "vocab_size", "tie_word_embeddings",
    ),
    "layer": ("num_kv_heads", "key_dim", "value_dim"),
}  # fmt: skip


def symbol(name: str) -> sympy.Symbol:
    """What stands for a parameter or a field of this name, or is written for it."""
    return sympy.Symbol(name, positive=True)


def _stand_in(parameter: str) -> object:
    """What a function is called with: a symbol, a model of equal layers, or one layer."""
    if parameter not in FIELDS:
        return symbol(parameter)
    fields = {name: symbol(name) for name in FIELDS[parameter]}
    if parameter == "layer":
        return LayerSpec("full", **fields)
    layer = LayerSpec("full", fields["num_kv_heads"], fields["head_dim"], fields["head_dim"])
    groups = ((fields["num_layers"], layer),)
    return SimpleNamespace(**fields, layer_groups=groups, is_dense_llama=True,
                           qk_norm=False, biased=())


def expression(function: Callable) -> sympy.Expr:
    """What a function of costs.py returns for symbols."""
    return sympy.sympify(function(*map(_stand_in, inspect.signature(function).parameters)))


class _Printer(JavascriptCodePrinter):
    """Small whole powers as products: exact, where Math.pow need not be."""

    def _print_Pow(self, expr):  # noqa: N802 (SymPy's naming)
        base, exponent = expr.as_base_exp()
        if exponent.is_Integer and 2 <= exponent <= 4:
            return "*".join([self.parenthesize(base, 50)] * int(exponent))
        return super()._print_Pow(expr)


def _javascript(function: Callable) -> str:
    """An exported function with the same name and parameters, in the same order."""
    formula, parameters = expression(function), inspect.signature(function).parameters
    used = {str(s) for s in formula.free_symbols}
    taken = {p: [n for n in FIELDS[p] if n in used] for p in parameters if p in FIELDS}
    lines = [f"  const {{{', '.join(names)}}} = {owner};" for owner, names in taken.items()]
    signature = ", ".join(f"{p} = 2" if p == "bytes_per_element" else p for p in parameters)
    # One division at the end: whole numbers stay exact up to 2^53.
    numerator, denominator = map(_Printer().doprint, sympy.fraction(sympy.together(formula)))
    quotient = numerator if denominator == "1" else f"({numerator})/({denominator})"
    body = "\n".join([*lines, f"  return {quotient};"])
    return f"export function {function.__name__}({signature}) {{\n{body}\n}}"


def javascript(functions: Iterable[Callable]) -> str:
    """Functions of costs.py as the text of one ES module."""
    return "\n\n".join(map(_javascript, functions)) + "\n"


def called_in(script: str) -> list[Callable]:
    """The functions of costs.py that a script calls by their names."""
    everything = (f for _, f in inspect.getmembers(costs, inspect.isfunction))
    own = [f for f in everything if f.__module__ == costs.__name__]
    return [f for f in own if re.search(rf"(?<![\w.]){f.__name__}\(", script)]
