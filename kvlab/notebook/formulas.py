"""costs.py once more, as mathematics and as JavaScript.

Each function of costs.py is called with SymPy symbols instead of numbers. What comes back is
the formula: LaTeX for the formula sheet, JavaScript for the widgets. So a page, a widget, a
table and a test cannot disagree, for they are one piece of arithmetic.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import sympy
from sympy.printing.jscode import JavascriptCodePrinter

from kvlab import costs
from kvlab.specs import DATA_DIR, LayerSpec

_FACTS = json.loads((DATA_DIR / "formulas.json").read_text("utf-8"))
#: Python name -> the letter of the book's notation page.
SYMBOLS: dict[str, str] = _FACTS["symbols"]
#: Letters that LaTeX writes in another way than SymPy would.
LATEX: dict[str, str] = _FACTS["latex"]
#: Parameters that are objects: the fields that JavaScript takes out of them.
_FIELDS = {"spec": tuple(SYMBOLS)[:8], "layer": ("num_kv_heads", "key_dim", "value_dim")}


def _symbol(name: str) -> sympy.Symbol:
    return sympy.Symbol(SYMBOLS[name], positive=True)


def _stand_in(parameter: str) -> object:
    """What a function is called with: a symbol, a model of L equal layers, or one layer."""
    if parameter not in _FIELDS:
        return _symbol(parameter)
    fields = {name: _symbol(name) for name in _FIELDS[parameter]}
    if parameter == "layer":
        return LayerSpec("full", **fields)
    layer = LayerSpec("full", fields["num_kv_heads"], fields["head_dim"], fields["head_dim"])
    groups = ((fields["num_layers"], layer),)
    return SimpleNamespace(**fields, layer_groups=groups, is_dense_llama=True)


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
        names = {sympy.Symbol(k, positive=True): v for k, v in LATEX.items()}
        expression = sympy.factor_terms(self.expression)
        return sympy.latex(expression, symbol_names=names, mul_symbol=r"\,")

    def javascript(self) -> str:
        """An exported function with the same name and parameters, in the same order."""
        used = {str(s) for s in self.expression.free_symbols}
        lines = []
        for parameter in self.parameters:
            if parameter in _FIELDS:
                owned = [name for name in _FIELDS[parameter] if SYMBOLS[name] in used]
                taken = ", ".join(f"{name}: {SYMBOLS[name]}" for name in owned)
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
    expression = sympy.sympify(function(*map(_stand_in, parameters)))
    description = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ")
    return Formula(function.__name__, function, parameters, expression, description)


#: The sections of the formula sheet.
SECTIONS = {
    title: tuple(_formula(getattr(costs, name)) for name in names)
    for title, names in _FACTS["sections"].items()
}
FORMULAS: dict[str, Formula] = {f.name: f for section in SECTIONS.values() for f in section}


def javascript() -> str:
    """Every formula as the text of one ES module."""
    return "\n\n".join(formula.javascript() for formula in FORMULAS.values()) + "\n"
