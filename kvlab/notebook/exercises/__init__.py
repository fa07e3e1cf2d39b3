"""Exercises that check themselves: `check`, `hint`, `status`, and `predict` before a measurement.

An exercise is data: a question, a solution, a hint, and the plausible wrong answers with the hint
that each deserves. A checker compares an answer with the solution and returns that hint; there is
one for a value, a number, a choice and a function. chNN.py holds a chapter's exercises, loaded
when one is first named, from the standard library alone, so that the rendered page runs them too;
tensors.py those of all chapters that need torch. What is answered stays in this process: nothing
is sent or stored.
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

from kvlab.errors import KvlabError

CHAPTERS = range(1, 9)
TORCH_CHAPTERS = (2, 6)  # with exercises in tensors.py

#: (answer, solution) -> None if the answer is right, else a hint that names the mistake
Checker = Callable[[Any, Any], str | None]


class ExerciseError(KvlabError):
    """No exercise or chapter of that number, or a prediction that is no number."""


@dataclass(frozen=True)
class Exercise:
    """One numbered task.

    solution     an answer that check accepts (the value itself, or the function asked for)
    hint         a first push for a reader who asks before answering
    needs_torch  no page can run it
    """

    id: str
    title: str
    question: str
    check: Checker
    solution: Any
    hint: str
    needs_torch: bool = False


_solved: set[str] = set()
_predictions: dict[str, float] = {}


def chapter_exercises(chapter: int) -> list[Exercise]:
    """The exercises of one chapter, in order; those that need torch only where there is one."""
    if chapter not in CHAPTERS:
        raise ExerciseError(
            f"chapter {chapter!r}: expected a number from {CHAPTERS[0]} to {CHAPTERS[-1]}"
        )
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
    raise ExerciseError(
        f"exercise {exercise_id!r}: expected a number such as '2.1'; status() lists them all"
    )


def verdict(exercise_id: str, answer: Any) -> tuple[bool, str]:
    """(is it right, what to tell the reader). None counts as "not answered yet"."""
    exercise = find(exercise_id)
    if answer is None:
        return False, f"{exercise.id} {exercise.title}: no answer yet. {exercise.question}"
    try:
        mistake = exercise.check(answer, exercise.solution)
    except Exception as error:  # a function that fails, or parts of a kind nobody expected
        what = f"checking the answer fails ({type(error).__name__}: {error})"
        mistake = f"{what}. {exercise.question}"
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
        raise ExerciseError(f"{name}: you predict {value!r}; expected a number") from None
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


# The checkers. A hint is a template: {got} is what the reader gave, and where a function is asked
# {case} are the arguments and {right} is what the function should have given.


def value(
    mistakes: Sequence[tuple[Any, str]],
    otherwise: str,
    *,
    expected: str,
    read: Callable[[Any], Any],
    same: Callable[[Any, Any], bool] = operator.eq,
) -> Checker:
    """A checker for a value.

    mistakes   (a wrong value, or a predicate of the answer; the mistake it betrays)
    otherwise  the hint for every other wrong answer
    read       makes an answer comparable; where it fails or gives None, the hint is `expected`
    """

    def check_value(answer: Any, solution: Any) -> str | None:
        try:
            got = read(answer)
        except (TypeError, ValueError, LookupError):
            got = None
        if got is None:
            return expected.format(kind=type(answer).__name__)
        if same(got, read(solution)):
            return None
        for wrong, mistake in mistakes:
            if wrong(got) if callable(wrong) else same(got, wrong):
                return mistake.format(got=got)
        return otherwise.format(got=got)

    return check_value


def number(
    mistakes: Sequence[tuple[float, str]], otherwise: str, rel_tol: float = 1e-9
) -> Checker:
    """A checker for one number, with the wrong numbers that betray a mistake."""
    return value(
        mistakes,
        otherwise,
        expected="expected a number, got {kind}",
        read=lambda x: x if isinstance(x, Real) and not isinstance(x, bool) else None,  # numpy's
        same=lambda a, b: math.isclose(a, b, rel_tol=rel_tol),
    )


def pair(mistakes: Sequence[tuple[Any, str]], otherwise: str, meaning: str) -> Checker:
    """A checker for two numbers."""
    return value(
        mistakes,
        otherwise,
        expected=f"expected a pair: {meaning}",
        read=lambda x: tuple(x) if isinstance(x, tuple | list) and len(x) == 2 else None,
    )


def choice(why: dict[str, str], names: str, left_out: str = "") -> Checker:
    """A checker for a set of names, some of those in `why`.

    why       name -> what a reader overlooks who chooses it (or leaves it out) wrongly
    names     the names, as a hint calls them
    left_out  the hint if {count} are left out; without it each has its own in `why`
    """

    def check_choice(answer: Any, solution: Any) -> str | None:
        if not isinstance(answer, set | frozenset | list | tuple):
            kind = type(answer).__name__
            return f"expected a set, got {kind}: give a set with some of {names}"
        for unknown in sorted(set(answer) - set(why), key=str):
            return f"{unknown!r} is none of {names}"
        for name in why:
            if name in answer and name not in solution:
                return f"{name}: {why[name]}"
        for name in why:
            if name not in answer and name in solution:
                count = len(set(solution) - set(answer))
                return left_out.format(count=count) or f"{name}: {why[name]}"
        return None

    return check_choice


def call(function: Callable, *case: Any) -> Any:
    """What a function gives for copies of the arguments: a reader's function may change them."""
    return function(*copy.deepcopy(case))


def is_none(got: Any, *case: Any) -> bool:
    """The commonest sign of all: a function without a return."""
    return got is None


def function(
    signature: str,
    cases: Iterable[tuple],
    mistakes: Sequence[tuple[Callable, str]] = (),
    otherwise: str = "",
    *,
    signs: Sequence[tuple[Callable[..., bool], str]] = (),
    run: Callable[..., Any] = call,
    same: Callable[[Any, Any], bool] = operator.eq,
    expected: Callable[..., Any] | None = None,
    fails: str = "for {case} it raised {kind}: {error}",
) -> Checker:
    """A checker for a function: the first case that comes out wrong is diagnosed.

    cases      the arguments of each case
    mistakes   (a wrong function, the mistake it betrays if it gives the same for the case)
    otherwise  the hint for every other wrong outcome
    signs      (a predicate of a wrong outcome and its case, the hint); asked before mistakes
    run        (function, *case) -> outcome
    expected   (*case) -> the right outcome; without it that of the solution
    fails      the hint if the function raises something
    """
    cases = list(cases)

    def check_function(answer: Any, solution: Any) -> str | None:
        if not callable(answer):
            return f"define the function {signature} and pass the function itself"
        for case in cases:
            try:
                got = run(answer, *case)
            except Exception as error:  # the reader's own code may raise anything
                kind, lines = type(error).__name__, str(error).strip().splitlines()
                return fails.format(case=case, kind=kind, error=lines[-1] if lines else kind)
            right = expected(*case) if expected else run(solution, *case)
            if got is not None and same(got, right):
                continue
            seen = (text for sign, text in signs if sign(got, *case))
            alike = (text for wrong, text in mistakes if same(got, run(wrong, *case)))
            mistake = next(chain(seen, alike), otherwise)
            return mistake.format(case=case, got=got, right=right)
        return None

    return check_function


def in_turn(*checkers: Checker) -> Checker:
    """Several checkers of one answer; the first that finds a mistake names it."""

    def check_in_turn(answer: Any, solution: Any) -> str | None:
        return next(filter(None, (checker(answer, solution) for checker in checkers)), None)

    return check_in_turn
