"""Finds numbers typed into prose. A number in a sentence must come from code, or be an input.

Allowed in prose: what stands in code spans, math, links and HTML tags; names that carry digits
(Llama-3-8B, bf16, sm_75, H100); versions, years and numbered places (chapter 5, exercise 3.1,
step 2); plain counts up to ten; and inputs, that is numbers that stand as literals in the chapter's
own code, comparisons and asserts aside (a number one compares with is a result).
"""

from __future__ import annotations

import ast
import re

import nbformat

HIDDEN = [
    re.compile(pattern, re.DOTALL | re.MULTILINE)
    for pattern in (
        r"^---\n.*?\n---$",                      # front matter
        r"^ {0,3}(`{3,}|~{3,}|:{3,})[^\n]*\n.*?^ {0,3}\1 *$",  # fenced code
        r"<!--.*?-->", r"<style.*?</style>", r"<script.*?</script>", r"<svg.*?</svg>",
        r"\$\$.*?\$\$", r"\$[^$\n]+(?:\n[^$\n]+)?\$",         # math
        r"(`+)(?!`).+?(?<!`)\1(?!`)",            # code spans
        r"\]\([^)]*\)", r"<[^>]+>", r"https?://\S+", r"\{[a-z:]+\}`[^`]*`",  # links, tags, roles
        r"^\(.+\)=$", r"^\[[^\]]+\]:.*$",         # targets, link definitions
    )
]
#: Words that name a numbered place: "chapter 5", "steps 1 and 2", "exercise 3.1".
PLACE = (r"(?:chapters?|exercises?|steps?|sections?|figures?|tables?|layers?|blocks?|positions?|"
         r"tokens?|heads?|slots?|lines?|row|rows|part|version|page|rank|no\.|compute capability|"
         r"ids?|requests?|sequences?|trap|question|mistake|arxiv:?)")
ALLOWED = [
    re.compile(pattern, re.IGNORECASE | re.MULTILINE)
    for pattern in (
        r"^#+ +\d+(?:\.\d+)*\.?",                        # numbered headings
        r"^\s*(?:>\s*)?\d+[.)] ",                       # numbered lists
        r"\*\*\d+\.\d+\*\*", r"\*\*\d+\.\d+[. ]",      # exercise ids
        PLACE + r"\s+\d+(?:\.\d+)?(?:(?:\s*(?:,|and|or|to|through|-)\s*)+\d+(?:\.\d+)?)*",
        r"\b\d+(?:\.\d+)+(?:\.[a-z]\w+)?\b(?=[^%x×]|$)(?<=\.\d\.\d)",  # 1.2.3 versions
        r"\b[A-Za-z]+ \d+\.\d+\b(?! ?(?:[kKMGT]i?B|ms|s\b|%|x\b|×))(?<=[a-z] \d\.\d)",
        r"(?<![\d,.])(?:19[5-9]\d|20[0-3]\d)(?![\d,.]\d|\d|[%x×])",  # years
        r"[A-Za-z_]+[-_/.+]?\d[\w.+/-]*", r"\b\d+[A-Za-z_][A-Za-z]+[\w-]*",  # bf16, 2nd, 8xA100
        r"\b\d+[-‑](?:bit|byte|token|layer|head|core|way|D|step|row|block|GPU|request)s?\b",
        r"\b\d+[BM]\b(?=[ -](?:model|config|checkpoint|shape))",      # an 8B model
        r"\b(?:Python|Triton|PyTorch|torch|CUDA|Sphinx|transformers|version)s? \d[\d.]*",
    )
]
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
RESULT_UNIT = re.compile(
    r"\s?(?:[kKMGTP]i?B|bytes|FLOPs?|[MGTP]FLOPs?|ms|µs|us|seconds|times|%|x|×|percent)\b|\s?[%×]")


def plain(text: str) -> str:
    """Markdown with everything that is no sentence blanked out; line numbers stay."""
    for pattern in HIDDEN:
        text = pattern.sub(lambda match: "\n" * match[0].count("\n") + " ", text)
    return text


def literals(code: str) -> set[float]:
    """Numbers that code is given: all literals but those in comparisons and asserts."""
    try:
        tree = ast.parse("\n".join(line for line in code.splitlines() if line[:1] not in "%!"))
    except SyntaxError:
        return set()
    results = {id(node) for parent in ast.walk(tree)
               if isinstance(parent, ast.Assert | ast.Compare) for node in ast.walk(parent)}
    return {float(node.value) for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and type(node.value) in (int, float)
            and id(node) not in results}


def typed_results(text: str, inputs: set[float] = frozenset()) -> list[tuple[int, str]]:
    """(line, number) of each number in Markdown that may be a typed result."""
    found = []
    for line_number, line in enumerate(plain(text).splitlines(), 1):
        spans = [match.span() for pattern in ALLOWED for match in pattern.finditer(line)]
        for match in NUMBER.finditer(line):
            if any(start <= match.start() < stop for start, stop in spans):
                continue
            number = match[0].rstrip(",.")
            value = float(number.replace(",", ""))
            bare = not RESULT_UNIT.match(line, match.start() + len(number))
            if value in inputs or (bare and value <= 10 and value == int(value)):
                continue
            found.append((line_number, line[match.start():match.start() + len(number) + 8].strip()))
    return found


def chapter_results(notebook: nbformat.NotebookNode, exercises: str = "") -> list[str]:
    """Typed results in a chapter's Markdown cells. `exercises`: the code of its exercises."""
    inputs = literals(exercises)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            inputs |= literals(cell.source)
    return [f"cell {number}, line {line}: {text!r}"
            for number, cell in enumerate(notebook.cells) if cell.cell_type == "markdown"
            for line, text in typed_results(cell.source, inputs)]
