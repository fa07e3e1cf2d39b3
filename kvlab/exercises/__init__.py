"""Exercises that check themselves: `check`, `hint`, `status`, and `predict` before a measurement.

An Exercise is registered by its chapter's module and loaded when it is first named: chNN.py uses
the standard library alone and also runs inside the rendered page, chNN_torch.py holds those that
need torch. What is answered stays in this process: nothing is sent or stored.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from kvlab.errors import KvlabError

CHAPTERS = range(1, 9)


class UnknownExercise(KvlabError):
    """No exercise, or no chapter, of that number."""


class NotANumber(KvlabError):
    """A prediction that is no number."""


class Wrong(Exception):
    """Raised by a checker. The text is the hint: it names the mistake, not the answer."""


@dataclass(frozen=True)
class Exercise:
    """One numbered task.

    check      called with the answer; returns if it is right, raises Wrong(hint) if not
    solution   an answer that check accepts (the value itself, or the function asked for)
    hint       a first push for a reader who asks before answering
    """

    id: str
    title: str
    question: str
    check: Callable[[Any], None]
    solution: Any
    hint: str


_exercises: dict[str, Exercise] = {}
_torch: set[str] = set()  # exercises of the chNN_torch modules
_solved: set[str] = set()
_predictions: dict[str, float] = {}


def register(exercise: Exercise) -> Exercise:
    """Add an exercise to its chapter's list. The number must be new."""
    if exercise.id in _exercises:
        raise KvlabError(f"exercise {exercise.id} is registered twice; give one another number")
    _exercises[exercise.id] = exercise
    return exercise


def chapter_exercises(chapter: int) -> list[Exercise]:
    """The exercises of one chapter, in order; those that need torch only where there is one."""
    if chapter not in CHAPTERS:
        raise UnknownExercise(
            f"chapter {chapter!r}: expected a number from {CHAPTERS[0]} to {CHAPTERS[-1]}"
        )
    for name in (f"ch{chapter:02d}", f"ch{chapter:02d}_torch"):
        is_there = importlib.util.find_spec(f"{__name__}.{name}") is not None
        if is_there and (not name.endswith("_torch") or importlib.util.find_spec("torch")):
            before = set(_exercises)
            importlib.import_module(f"{__name__}.{name}")
            if name.endswith("_torch"):
                _torch.update(set(_exercises) - before)
    own = [e for e in _exercises.values() if e.id.split(".")[0] == str(chapter)]
    return sorted(own, key=lambda e: int(e.id.split(".")[1]))


def needs_torch(exercise: Exercise) -> bool:
    """Whether the exercise comes from a chapter's torch module, which no page can run."""
    return exercise.id in _torch


def find(exercise_id: str) -> Exercise:
    """The exercise with this number, such as "2.1"."""
    chapter = str(exercise_id).split(".")[0]
    if chapter.isdecimal() and int(chapter) in CHAPTERS:
        for exercise in chapter_exercises(int(chapter)):
            if exercise.id == exercise_id:
                return exercise
    raise UnknownExercise(
        f"exercise {exercise_id!r}: expected a number such as '2.1'; status() lists them all"
    )


def verdict(exercise_id: str, answer: Any) -> tuple[bool, str]:
    """(is it right, what to tell the reader). None counts as "not answered yet"."""
    exercise = find(exercise_id)
    if answer is None:
        return False, f"{exercise.id} {exercise.title}: no answer yet. {exercise.question}"
    try:
        exercise.check(answer)
    except Wrong as wrong:
        return False, f"{exercise.id} not yet: {wrong}"
    except Exception as error:  # a function that fails, or parts of a kind nobody expected
        what = f"checking the answer fails ({type(error).__name__}: {error})"
        return False, f"{exercise.id} not yet: {what}. {exercise.question}"
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
        raise NotANumber(f"{name}: you predict {value!r}; expected a number") from None
    print(f"{name}: you predict {value:g}")


def outcome(name: str, measured: float) -> None:
    """Set the measurement beside the prediction."""
    if name not in _predictions:
        print(f"{name}: measured {measured:.4g}; you made no prediction")
        return
    guess = _predictions[name]
    ratio = measured / guess if guess else math.inf
    print(f"{name}: you predicted {guess:.4g}, measured {measured:.4g}: {ratio:.3g} x your guess")


def number(
    expected: float, traps: Sequence[tuple[float, str]], otherwise: str, rel_tol: float = 1e-9
) -> Callable[[Any], None]:
    """A checker for one number. A trap is a wrong value and the mistake it betrays."""

    def check_number(answer: Any) -> None:
        if isinstance(answer, bool) or not isinstance(answer, Real):  # numpy's too
            raise Wrong(f"expected a number, got {type(answer).__name__}")
        if math.isclose(answer, expected, rel_tol=rel_tol):
            return
        for value, mistake in traps:
            if math.isclose(answer, value, rel_tol=rel_tol):
                raise Wrong(mistake)
        raise Wrong(otherwise)

    return check_number


def ask_exercise(exercise_id: str, answer: str) -> dict:
    """The verdict on an answer typed into a page: a Python value, or a function where one is asked.

    A value is read as a literal and never run. A function is run only by the Python inside a
    rendered page, which has no files and no network; in a notebook it belongs into a cell.
    """
    exercise = find(exercise_id)
    try:
        if not callable(exercise.solution):
            value = ast.literal_eval(
                answer.strip().replace(",", "") if _is_count(answer) else answer
            )
        elif sys.platform == "emscripten":
            scope: dict[str, Any] = {}
            exec(compile(answer, "<your answer>", "exec"), scope)
            value = next((x for x in reversed(scope.values()) if callable(x)), None)
        else:
            return {
                "right": False,
                "text": f"{exercise.id}: define the function in a cell and check it there",
            }
    except Exception as error:  # whatever the reader typed
        return {
            "right": False,
            "text": f"{exercise.id} cannot be read: {type(error).__name__}: {error}",
        }
    right, text = verdict(exercise_id, value)
    return {"right": right, "text": text}


def _is_count(text: str) -> bool:
    """A number written with thousands separators, such as 46,080."""
    return text.strip().replace(",", "").isdigit()
