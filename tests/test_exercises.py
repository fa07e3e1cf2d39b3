"""Every exercise is proved: its solution passes, and each plausible wrong answer is named."""

import importlib
from pathlib import Path

import numpy as np
import pytest

from book.extension.page_python import page_modules
from kvlab.notebook import NotebookError, exercises

WRONG = {
    number: importlib.import_module(f"wrong_answers.ch{number:02d}").WRONG
    for number in exercises.CHAPTERS
}
ALL = [e for number in exercises.CHAPTERS for e in exercises.chapter_exercises(number)]


@pytest.mark.parametrize("exercise", ALL, ids=lambda e: e.id)
def test_solution_is_accepted(exercise):
    assert exercises.verdict(exercise.id, exercise.solution) == (
        True,
        f"{exercise.id} right. {exercise.title}",
    )


@pytest.mark.parametrize("exercise", ALL, ids=lambda e: e.id)
def test_at_least_five_wrong_answers_are_rejected_with_their_hint(exercise):
    wrong = WRONG[int(exercise.id.split(".")[0])][exercise.id]
    assert len(wrong) >= 5
    for answer, fragment in wrong:
        right, text = exercises.verdict(exercise.id, answer)
        assert not right, f"{exercise.id} accepts {answer!r}"
        assert fragment in text, f"{exercise.id} on {answer!r} says {text!r}"


@pytest.mark.parametrize("number", exercises.CHAPTERS)
def test_a_chapter_has_at_least_three(number):
    assert len(exercises.chapter_exercises(number)) >= 3
    assert sorted(WRONG[number]) == [e.id for e in exercises.chapter_exercises(number)]


def test_no_answer_is_not_a_wrong_answer():
    right, text = exercises.verdict("1.1", None)
    assert not right and "no answer yet" in text


def test_unknown_exercise_is_a_named_error():
    for name in ("9.1", "1.99", "x", "", "²", 2.1):
        with pytest.raises(NotebookError, match="status"):
            exercises.find(name)
    for chapter in (0, 9, "x"):
        with pytest.raises(NotebookError, match="from 1 to 8"):
            exercises.status(chapter)


@pytest.mark.parametrize("exercise", ALL, ids=lambda e: e.id)
def test_an_answer_of_any_kind_gets_a_verdict_and_never_a_traceback(exercise):
    values = [10**400, float("nan"), 1j, "x", b"x", [], {}, ("a", "b"), (None, None), [[1]]]
    functions = [lambda: 1 / 0, lambda *_: "x", lambda *_: float("nan"), int]
    names = dict.fromkeys(("req_indices", "positions", "query_start_loc", "seq_lens"), 5)
    for answer in (*values, *functions, names, object(), np.arange(3)):
        right, text = exercises.verdict(exercise.id, answer)
        assert not right and text.startswith(f"{exercise.id} not yet: "), answer


def test_a_number_of_numpy_is_a_number():
    solution = exercises.find("2.1").solution
    for number in (np.int64(solution), np.float32(solution)):
        assert exercises.verdict("2.1", number)[0]


def test_prediction_and_outcome(capsys):
    exercises.outcome("never predicted", 3)
    exercises.predict("steps", 10)
    exercises.outcome("steps", 20)
    for value in ("many", None):
        with pytest.raises(NotebookError, match=f"{value!r}; expected a number"):
            exercises.predict("steps", value)
    assert capsys.readouterr().out.splitlines() == [
        "never predicted: measured 3; you made no prediction",
        "steps: you predict 10",
        "steps: you predicted 10, measured 20: 2 x your guess",
    ]


def test_typed_answers_are_read_as_literals_and_never_run():
    ask = exercises.ask_exercise
    right = exercises.find("2.1").solution
    assert ask("2.1", f"{right:,}")["right"] and ask("2.1", str(right))["right"]
    assert "query heads share" in ask("2.1", str(3 * right))["text"]
    for text in ("__import__('os').getpid()", "1 +", "", "a b"):
        assert "cannot be read" in ask("2.1", text)["text"]
    assert "define the function in a cell" in ask("1.4", "def f(): pass")["text"]


def test_page_chapters_run_on_the_standard_library():
    """page_modules() raises where a module that the page runs imports anything else."""
    chapters = {p.stem for p in Path(exercises.__file__).parent.glob("ch[0-9][0-9].py")}
    assert {f"kvlab.notebook.exercises.{name}" for name in chapters} <= set(page_modules())
