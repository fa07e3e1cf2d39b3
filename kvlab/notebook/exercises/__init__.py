"""Exercises that check themselves: `check`, `hint`, `status`, and `predict` before a measurement.

An exercise is data: a question, its solution, and plausible wrong answers, each with the hint that
names the mistake. chNN.py holds a chapter's, loaded when one is first named, from the standard
library alone, so that the rendered page runs them too; tensors.py those that need torch. What is
answered stays in this process: nothing is sent or stored.
"""

from __future__ import annotations

import ast
import copy
import importlib
import importlib.util
import math
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Real
from typing import Any

from kvlab.notebook import NotebookError, require

CHAPTERS = range(1, 9)
TORCH_CHAPTERS = (2, 6)  # with exercises in tensors.py


@dataclass(frozen=True)
class Exercise:
    """One numbered task.

    find_mistake  answer -> None if it is right, else the hint that names the mistake
    solution      the right answer (the value itself, or the function asked for)
    hint          a first push for a reader who asks before answering
    needs_torch   no page can run it
    """

    id: str
    title: str
    question: str
    find_mistake: Callable[[Any], str | None]
    solution: Any
    hint: str
    needs_torch: bool = False


_solved: set[str] = set()
_predictions: dict[str, float] = {}


def chapter_exercises(chapter: int) -> list[Exercise]:
    """The exercises of one chapter, in order; those that need torch only where there is one."""
    span = f"{CHAPTERS[0]} to {CHAPTERS[-1]}"
    require(chapter in CHAPTERS, f"chapter {chapter!r}: expected a number from {span}")
    names = [f"ch{chapter:02d}"]
    if chapter in TORCH_CHAPTERS and importlib.util.find_spec("torch"):
        names.append("tensors")
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    own = [e for module in modules for e in module.EXERCISES if e.id.startswith(f"{chapter}.")]
    return sorted(own, key=lambda e: int(e.id.split(".")[1]))


def find(exercise_id: str) -> Exercise:
    """The exercise with this number, such as "2.1"."""
    chapter = str(exercise_id).split(".")[0]
    if chapter.isdecimal() and int(chapter) in CHAPTERS:
        for exercise in chapter_exercises(int(chapter)):
            if exercise.id == exercise_id:
                return exercise
    raise NotebookError(
        f"exercise {exercise_id!r}: expected a number such as '2.1'; status() lists them all"
    )


def verdict(exercise_id: str, answer: Any) -> tuple[bool, str]:
    """(is it right, what to tell the reader). None counts as "not answered yet"."""
    exercise = find(exercise_id)
    if answer is None:
        return False, f"{exercise.id} {exercise.title}: no answer yet. {exercise.question}"
    try:
        mistake = exercise.find_mistake(answer)
    except Exception as error:  # a function that fails, or parts of a kind nobody expected
        kind = type(error).__name__
        mistake = f"checking the answer fails ({kind}: {error}). {exercise.question}"
    if mistake is not None:
        return False, f"{exercise.id} not yet: {mistake}"
    _solved.add(exercise.id)
    return True, f"{exercise.id} right. {exercise.title}"


def check(exercise_id: str, answer: Any) -> None:
    """Say whether the answer is right, and if not, what the mistake looks like."""
    print(verdict(exercise_id, answer)[1])


def hint(exercise_id: str) -> None:
    """A push in the right direction."""
    print(find(exercise_id).hint)


def status(*chapters: int) -> None:
    """What is solved in this session and what is left, one line an exercise."""
    for chapter in chapters or CHAPTERS:
        for exercise in chapter_exercises(chapter):
            print(f"[{'x' if exercise.id in _solved else ' '}] {exercise.id} {exercise.title}")


def predict(name: str, value: float) -> None:
    """Commit to a number before the measurement is shown."""
    try:
        _predictions[name] = float(value)
    except (TypeError, ValueError, OverflowError):
        raise NotebookError(f"{name}: you predict {value!r}; expected a number") from None
    print(f"{name}: you predict {value:g}")


def outcome(name: str, measured: float) -> None:
    """Set the measurement beside the prediction."""
    if name not in _predictions:
        print(f"{name}: measured {measured:.4g}; you made no prediction")
        return
    guess = _predictions[name]
    ratio = measured / guess if guess else math.inf
    print(f"{name}: you predicted {guess:.4g}, measured {measured:.4g}: {ratio:.3g} x your guess")


def ask_exercise(exercise_id: str, answer: str) -> dict:
    """The verdict on an answer typed into a page: a Python value, or a function where one is asked.

    A value is read as a literal and never run. A function is run only by the Python inside a
    rendered page, which has no files and no network; in a notebook it belongs into a cell.
    """
    exercise = find(exercise_id)
    right, digits = False, answer.strip().replace(",", "")  # of a count such as 46,080
    try:
        if not callable(exercise.solution):
            typed = ast.literal_eval(digits if digits.isdigit() else answer)
            right, text = verdict(exercise_id, typed)
        elif sys.platform == "emscripten":
            names: dict[str, Any] = {}
            exec(compile(answer, "<your answer>", "exec"), names)
            typed = next((x for x in reversed(names.values()) if callable(x)), None)
            right, text = verdict(exercise_id, typed)
        else:
            text = f"{exercise.id}: define the function in a cell and check it there"
    except Exception as error:  # whatever the reader typed
        text = f"{exercise.id} cannot be read: {type(error).__name__}: {error}"
    return {"right": right, "text": text}


# The kinds of exercise. Each takes number, title, question and solution, then the mistakes: pairs
# of a wrong answer and the hint that it gets. `otherwise` is the hint for every other wrong answer.
# Hints are templates: {got} is what the reader gave and, where a function is asked, {case} its
# arguments and {right} what it should have given.


def value(
    id: str, title: str, question: str, solution: Any, *mistakes: tuple[Any, str],
    otherwise: str, hint: str, expected: str, read: Callable[[Any], Any],
    same: Callable[[Any, Any], bool] = operator.eq,
) -> Exercise:  # fmt: skip
    """An exercise that asks for a value. A mistake is a wrong value, or a predicate of the answer.

    read   makes an answer comparable; where it fails or gives None, the hint is `expected`
    """

    def find_mistake(answer: Any) -> str | None:
        try:
            got = read(answer)
        except (TypeError, ValueError):
            got = None
        if got is None:
            return expected.format(kind=type(answer).__name__)
        if same(got, read(solution)):
            return None
        for wrong, text in mistakes:
            if wrong(got) if callable(wrong) else same(got, wrong):
                return text.format(got=got)
        return otherwise.format(got=got)

    return Exercise(id, title, question, find_mistake, solution, hint)


def number(*task: Any, rel_tol: float = 1e-9, **hints: Any) -> Exercise:
    """An exercise that asks for one number."""
    return value(
        *task,
        **hints,
        expected="expected a number, got {kind}",
        read=lambda x: None if isinstance(x, bool) or not isinstance(x, Real) else x,
        same=lambda a, b: math.isclose(a, b, rel_tol=rel_tol),
    )


def choice(
    id: str, title: str, question: str, solution: set[str],
    *, why: dict[str, str], names: str, hint: str, left_out: str = "",
) -> Exercise:  # fmt: skip
    """An exercise that asks for a set of names, some of those in `why`.

    why       name -> what a reader overlooks who chooses it (or leaves it out) wrongly
    names     the names, as a hint calls them
    left_out  the hint if {count} are left out; without it each has its own in `why`
    """

    def find_mistake(answer: Any) -> str | None:
        if not isinstance(answer, set | frozenset | list | tuple):
            kind = type(answer).__name__
            return f"expected a set, got {kind}: give a set with some of {names}"
        for name in sorted(set(answer) - set(why), key=str):
            return f"{name!r} is none of {names}"
        for name in why:
            if name in answer and name not in solution:
                return f"{name}: {why[name]}"
        for name in sorted(solution - set(answer)):
            return left_out.format(count=len(solution - set(answer))) or f"{name}: {why[name]}"
        return None

    return Exercise(id, title, question, find_mistake, solution, hint)


def near(got: Sequence[float], right: Sequence[float], rel_tol: float = 1e-9) -> bool:
    """Whether two lists of numbers agree."""
    close = (math.isclose(a, b, rel_tol=rel_tol, abs_tol=1e-12) for a, b in zip(got, right))
    return len(got) == len(right) and all(close)


def call(answer: Callable, *case: Any) -> Any:
    """What a function gives for copies of the arguments: a reader's function may change them."""
    return answer(*copy.deepcopy(case))


def function(
    id: str, title: str, question: str, solution: Callable, *mistakes: tuple[Callable, str],
    otherwise: str, hint: str, cases: Iterable[tuple],
    signs: Sequence[tuple[Callable[..., bool], str]] = (),
    run: Callable[..., Any] = call, same: Callable[[Any, Any], bool] = operator.eq,
    expected: Callable[..., Any] | None = None,
    prefix: str = "", fails: str = "for {case} it raised {kind}: {error}",
    needs_torch: bool = False,
) -> Exercise:  # fmt: skip
    """An exercise that asks for a function: the first case that comes out wrong is diagnosed.

    A mistake is a wrong function; it is the reader's where it gives the same for that case.

    cases     the arguments of each case
    signs     (predicate of a wrong outcome and its case, hint); looked for before the mistakes
    run       (function, *case) -> outcome
    expected  (*case) -> the right outcome; without it that of the solution
    prefix    goes before each hint
    fails     the hint if the function raises something
    """
    cases, signature = list(cases), question.removeprefix("Write ").split(")")[0] + ")"

    def find_mistake(answer: Any) -> str | None:
        if not callable(answer):
            return f"define the function {signature} and pass the function itself"
        for case in cases:
            try:
                got = run(answer, *case)
            except Exception as error:  # the reader's own code may raise anything
                kind, lines = type(error).__name__, str(error).strip().splitlines()
                return fails.format(case=case, kind=kind, error=lines[-1] if lines else kind)
            if got is None:
                return "the function returns None: return what the question asks for"
            right = expected(*case) if expected else run(solution, *case)
            if not same(got, right):
                seen = (text for sign, text in signs if sign(got, *case))
                alike = (text for wrong, text in mistakes if same(got, run(wrong, *case)))
                text = prefix + next(chain(seen, alike), otherwise)
                return text.format(case=case, got=got, right=right)
        return None

    return Exercise(id, title, question, find_mistake, solution, hint, needs_torch)
